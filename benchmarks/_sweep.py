import sys,time,torch
sys.path[:0]=["benchmarks","."]
import optimizers as o
from fabricamp.ops import bridge, table
from fabricamp.optimizers import FusedAdam
real=bridge.source
def t(f,n=20000):
    a=time.perf_counter()
    for _ in range(n): f()
    return round((time.perf_counter()-a)/n*1e6,3)
torch.cuda.init()
print("stream",t(lambda: torch.cuda.current_stream().cuda_stream),"raw",t(lambda: torch._C._cuda_getCurrentRawStream(0)),"curdev",t(torch.cuda.current_device))
f=getattr(torch._C,"_tensors_data_ptrs_at_indices_equal",None); print("ptrs fn", f)
ps=o.parameters([(64,64)]*1000)
if f:
    q=[p.data_ptr() for p in ps]; ix=list(range(1000)); print("fast ptrs", t(lambda: f(ps,q,ix),200))
print("grads",t(lambda:[p.grad for p in ps],200),"ptr",t(lambda:[p.data_ptr() for p in ps],200),"map",t(lambda:list(map(torch.Tensor.data_ptr,ps)),200),"incv",t(lambda:torch.autograd.graph.increment_version(ps),200),"id",t(lambda:list(map(id,ps)),200))
opt=FusedAdam(ps); opt.step()
print("step host us", t(opt.step,200), "gather", t(opt.gather,200))
import cProfile,pstats
pr=cProfile.Profile(); pr.enable()
for _ in range(100): opt.step()
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(9)
bw=o.copy_bandwidth()
for bounds in ("512","512, 3","512, 4","256, 6","1024, 1"):
  th=int(bounds.split(",")[0])
  bridge.source=lambda f,k=(),b=bounds: real(f,k).replace("__launch_bounds__(512)",f"__launch_bounds__({b})")
  bridge.kernel.cache_clear(); table.THREADS=th
  for ch in (16384,32768,65536):
    table.CHUNK_SIZE=ch; r=[]
    for n in ("resnet50","gpt2"):
      s=o.SETS[n](); e=sum(torch.Size(x).numel() for x in s)
      m=o.measure(FusedAdam(o.parameters(s)).step,20)
      r.append((n,round(m.gpu_ms,4),f"{28*e/m.gpu_ms/1e6/bw:.1%}"))
    print(bounds,ch,r,flush=True)
