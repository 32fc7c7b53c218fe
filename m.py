import torch, time
torch.set_num_threads(1)
ps=[torch.nn.Parameter(torch.zeros(4,4)) for _ in range(1000)]
for p in ps: p.grad=torch.zeros(4,4)
def t(name,f,n=200):
    f(); a=time.perf_counter()
    for _ in range(n): f()
    print(name, round((time.perf_counter()-a)/n*1e6,1),"us/1000")
gs=[p.grad for p in ps]
t("grads",lambda:[p.grad for p in ps])
D=torch.Tensor.data_ptr
t("ptr",lambda:[g.data_ptr() for g in gs])
t("ptrmap",lambda:list(map(D,gs)))
t("ids",lambda:list(map(id,gs)))
t("contig",lambda:all(map(torch.Tensor.is_contiguous,gs)))
t("dtype",lambda:[g.dtype for g in gs])
t("stride",lambda:[g.stride() for g in gs])
t("group",lambda:torch._C._group_tensors_by_device_and_dtype([gs],False))
ptr=[g.data_ptr() for g in gs]; idx=list(range(1000))
f=getattr(torch._C,"_tensors_data_ptrs_at_indices_equal",None)
print(f)
t("fast",lambda:f(gs,ptr,idx))
t("setnone",lambda:[setattr(p,'grad',None) for p in ps[:0]])
