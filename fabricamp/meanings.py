"""What is written elsewhere, or was once, by what it is called here: data alone, where the nearest name would lead astray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_GPUS: Final = "write accelerator='gpu', devices={value}; for none accelerator='cpu'"
_EPOCHS: Final = "write max_epochs={value}"
_STEPS: Final = "write max_steps={value}"
_RESUME: Final = "call fit(..., ckpt_path={value})"
_MIXED: Final = "write precision='16-mixed' or 'bf16-mixed'"
_HALF: Final = "write '16-mixed' (autocast over fp32 weights) or '16-true' (half weights)"
_BRAIN: Final = "write 'bf16-mixed' (autocast over fp32 weights) or 'bf16-true' (bfloat16 weights)"
_NO_TPU: Final = "TPUs are not offered"
_NO_ACCELERATOR: Final = "only CPUs and CUDA GPUs are offered: write 'cpu', 'gpu' or 'auto'"
_OPT_LEVEL: Final = "write precision=OptLevel('O2', {name}={value})"
_MODULES: Final = "the module makes its optimizers: give it to the module, and use it in configure_optimizers"
_LOADERS: Final = "give it to the DataLoader"
_TO_FIT: Final = "give it to fit, validate, test and predict"
_SHARDED: Final = (
    "models larger than a GPU are not offered: under 'ddp' and 'delayed_ddp', at O2 too, each GPU holds all of it"
)
_IN_CONFIGURATION: Final = (
    "the module makes its optimizers, so their options are arguments of its own: write module.lr=0.1"
)

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "Trainer": {
        # what Lightning 2 has beside these
        "barebones": "leave it out: what is switched off costs nothing (logger=False, enable_progress_bar=False, and so on)",
        "enable_autolog_hparams": "leave it out, and call save_hyperparameters(logger=False) for what loggers shall not get",
        "model_registry": "leave it out, and upload ModelCheckpoint's best_model_path after fit",
        "plugins": "pass precision= and strategy= an object, such as OptLevel('O2', loss_scale=128.0) or DDP(bucket_cap_mb=50)",
        "reload_dataloaders_every_n_epochs": "leave it out, and give the dataset or sampler a set_epoch(epoch)",
        "suggest_integrations": "leave it out",
        # what Lightning 1 had
        "amp_backend": "leave it out: apex's opt levels are precision='O1' or 'O2'",
        "amp_level": "write precision={value}",
        "auto_lr_find": "leave it out, and call Tuner(trainer).lr_find(model), of fabricamp.tuner",
        "auto_scale_batch_size": "leave it out, and call Tuner(trainer).scale_batch_size(model), of fabricamp.tuner",
        "auto_select_gpus": "leave it out: devices='auto' takes all GPUs, devices=[2, 3] these",
        "checkpoint_callback": "write enable_checkpointing={value}, or callbacks=[ModelCheckpoint(...)]",
        "default_save_path": "write default_root_dir={value}",
        "distributed_backend": "write strategy={value}",
        "early_stop_callback": "write callbacks=[EarlyStopping(monitor=...)]",
        "flush_logs_every_n_steps": "write logger=CSVLogger('logs', flush_logs_every_n_steps={value})",
        "gpus": _GPUS,
        "hpus": "HPUs are not offered",
        "ipus": "IPUs are not offered",
        "log_gpu_memory": "log torch.cuda.memory_stats() in a Callback",
        "max_nb_epochs": _EPOCHS,
        "min_nb_epochs": "write min_epochs={value}",
        "move_metrics_to_cpu": "leave it out",
        "multiple_trainloader_mode": "give fit a CombinedLoader(loaders, mode={value}) of fabricamp.data",
        "nb_gpu_nodes": "write num_nodes={value}",
        "num_processes": "write devices={value}, with accelerator='cpu' or 'gpu'",
        "overfit_pct": "write overfit_batches={value}",
        "prepare_data_per_node": "leave it out",
        "print_nan_grads": "write nan_policy='raise', which names the parameter",
        "process_position": "leave it out: one bar is drawn",
        "progress_bar_refresh_rate": "write enable_progress_bar=False for none; the bar is drawn by time, not by batches",
        "reload_dataloaders_every_epoch": "leave it out, and give the dataset or sampler a set_epoch(epoch)",
        "replace_sampler_ddp": "write use_distributed_sampler={value}",
        "resume_from_checkpoint": _RESUME,
        "row_log_interval": "write log_every_n_steps={value}",
        "stochastic_weight_avg": "keep torch.optim.swa_utils.AveragedModel in a Callback",
        "terminate_on_nan": "write nan_policy='raise' (or 'stop', which saves a checkpoint)",
        "test_percent_check": "write limit_test_batches={value}",
        "tpu_cores": _NO_TPU,
        "track_grad_norm": "call self.log_dict(fabricamp.utilities.grad_norm(self, 2)) in on_before_optimizer_step",
        "train_percent_check": "write limit_train_batches={value}",
        "truncated_bptt_steps": "set automatic_optimization = False, and step for each piece in training_step",
        "use_amp": _MIXED,
        "val_percent_check": "write limit_val_batches={value}",
        "weights_save_path": "write callbacks=[ModelCheckpoint(dirpath={value})]",
        "weights_summary": "write enable_model_summary=False for none, or callbacks=[ModelSummary(max_depth=2)]",
        # what apex calls an opt level and its options
        "keep_batchnorm_fp32": _OPT_LEVEL,
        "loss_scale": _OPT_LEVEL,
        "master_weights": _OPT_LEVEL,
        "opt_level": "write precision={value}",
        # what other trainers have
        "amp": _MIXED,
        "batch_size": _LOADERS,
        "bf16": "write precision='bf16-mixed'",
        "checkpoint": _RESUME,
        "ckpt_path": _RESUME,
        "clip_grad_norm": "write gradient_clip_val={value}",
        "datamodule": _TO_FIT,
        "deepspeed": _SHARDED,
        "device": "write accelerator='gpu', devices=1; for the CPU accelerator='cpu'",
        "distributed": "write devices=2, strategy='ddp'",
        "early_stopping": "write callbacks=[EarlyStopping(monitor=...)]",
        "epochs": _EPOCHS,
        "eval_steps": "write val_check_interval={value}",
        "fp16": "write precision='16-mixed'",
        "fsdp": _SHARDED,
        "gradient_accumulation_steps": "write accumulate_grad_batches={value}",
        "learning_rate": _MODULES,
        "log_dir": "write default_root_dir={value}, or logger=TensorBoardLogger({value})",
        "log_interval": "write log_every_n_steps={value}",
        "logging_dir": "write default_root_dir={value}, or logger=TensorBoardLogger({value})",
        "logging_steps": "write log_every_n_steps={value}",
        "lr": _MODULES,
        "lr_scheduler": _MODULES,
        "max_grad_norm": "write gradient_clip_val={value}",
        "mixed_precision": _MIXED,
        "model": _TO_FIT,
        "module": _TO_FIT,
        "monitor": "give it to ModelCheckpoint or EarlyStopping, in callbacks",
        "n_epochs": _EPOCHS,
        "num_devices": "write devices={value}",
        "num_epochs": _EPOCHS,
        "num_gpus": _GPUS,
        "num_steps": _STEPS,
        "num_train_epochs": _EPOCHS,
        "num_workers": _LOADERS,
        "optimizer": _MODULES,
        "optimizers": _MODULES,
        "output_dir": "write default_root_dir={value}",
        "patience": "write callbacks=[EarlyStopping(monitor=..., patience={value})]",
        "resume": _RESUME,
        "save_dir": "write default_root_dir={value}",
        "save_top_k": "write callbacks=[ModelCheckpoint(monitor=..., save_top_k={value})]",
        "scheduler": _MODULES,
        "seed": "call fabricamp.seed_everything({value})",
        "steps": _STEPS,
        "total_steps": _STEPS,
        "train_dataloader": _TO_FIT,
        "train_dataloaders": _TO_FIT,
        "use_cuda": "write accelerator='gpu'",
        "val_dataloader": _TO_FIT,
        "val_dataloaders": _TO_FIT,
        "weight_decay": _MODULES,
        "world_size": "write devices= (on each node) and num_nodes=",
    },
    "precision": {
        "amp": _HALF,
        "bfloat16": _BRAIN,
        "double": "write '64-true'",
        "float": "write '32-true'",
        "float16": _HALF,
        "float32": "write '32-true'",
        "float64": "write '64-true'",
        "fp16": _HALF,
        "fp32": "write '32-true'",
        "fp64": "write '64-true'",
        "fp8": "8-bit floats are not offered",
        "full": "write '32-true'",
        "half": _HALF,
        "mixed": _HALF,
        "transformer-engine*": "8-bit floats are not offered",
    },
    "strategy": {
        "colossalai": _SHARDED,
        "ddp2": "write 'ddp'",
        "ddp_cpu": "write strategy='ddp', accelerator='cpu'",
        "ddp_sharded*": _SHARDED,
        "deepspeed*": _SHARDED,
        "dp": "write 'ddp': a process for each GPU, where 'dp' had threads",
        "fsdp*": _SHARDED,
        "horovod": "write 'ddp'",
        "model_parallel": _SHARDED,
        "tpu*": _NO_TPU,
        "xla*": _NO_TPU,
    },
    "accelerator": {
        "ddp*": "write strategy={value}",
        "dp": "write strategy='ddp'",
        "hpu": _NO_ACCELERATOR,
        "ipu": _NO_ACCELERATOR,
        "mps": "Apple's GPUs are not offered: a Mac runs accelerator='cpu', which 'auto' chooses there",
        "npu": _NO_ACCELERATOR,
        "tpu": f"{_NO_TPU}: write 'cpu', 'gpu' or 'auto'",
        "xla": f"{_NO_TPU}: write 'cpu', 'gpu' or 'auto'",
        "xpu": _NO_ACCELERATOR,
    },
    "configuration": {
        "datamodule": "write data",
        "lr": "write module.lr",
        "lr_scheduler": _IN_CONFIGURATION,
        "model": "write module",
        "optimizer": _IN_CONFIGURATION,
        "optimizers": _IN_CONFIGURATION,
        "scheduler": _IN_CONFIGURATION,
        "seed_everything": "write seed",
    },
    "ModelCheckpoint": {
        "filepath": "write dirpath= for the folder and filename= for the file",
        "period": "write every_n_epochs={value}",
        "prefix": "put it into filename, as in filename='NAME-{{epoch}}'",
        "save_best_only": "write monitor='val_loss', save_top_k=1",
        "every_n_batches": "write every_n_train_steps={value}",
        "every_n_steps": "write every_n_train_steps={value}",
        "every_n_val_epochs": "write every_n_epochs={value}",
    },
    "EarlyStopping": {
        "metric": "write monitor={value}",
        "restore_best_weights": "load ModelCheckpoint's best_model_path after fit",
    },
    "ProgressBar": {
        "refresh_rate": "leave it out: the bar is drawn refresh_rate_hz times a second; for none enable_progress_bar=False",
    },
    "FusedOptimizer": {
        "capturable": "leave it out: a step can always be captured",
        "foreach": "leave it out: all tensors are updated in one pass",
        "fused": "leave it out: all tensors are updated in one pass",
        "learning_rate": "write lr={value}",
    },
    "self.log": {
        "loss": "give a name and a value, as in self.log('loss', loss)",
        "progress_bar": "write prog_bar=",
        "reduce": "write reduce_fx=",
        "step": "leave it out: values belong to trainer.global_step",
        "sync_dist_op": "write reduce_fx=",
        "tbptt_pad_token": "leave it out",
        "tbptt_reduce_fx": "leave it out",
        "weight": "write batch_size=",
    },
}
"""What to do instead, by where it was given and what was given.

``*`` stands for any rest; the words may hold ``{name}`` and ``{value}`` of what was given.
"""
