"""Arguments of other libraries and of Lightning 1, with what to write instead; only names whose nearest match would mislead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SHARDED: Final = "write strategy='fsdp', which shards parameters, gradients and optimizer state"
_FSDP: Final = "write strategy='fsdp', or FSDP(units=[...]) of fabricamp.strategies"

_ROWS: Final = {
    "Trainer": {
        "model_registry": "leave it out, and upload ModelCheckpoint's best_model_path after fit",
        "reload_dataloaders_every_epoch": "write reload_dataloaders_every_n_epochs=1",
        "suggest_integrations move_metrics_to_cpu prepare_data_per_node": "leave it out",
        "amp_backend": "leave it out: apex's opt levels are precision='O1' or 'O2'",
        "amp_level opt_level": "write precision={value}",
        "auto_lr_find": "leave it out, and call Tuner(trainer).lr_find(model), of fabricamp.tuner",
        "auto_scale_batch_size": "leave it out, and call Tuner(trainer).scale_batch_size(model), of fabricamp.tuner",
        "auto_select_gpus": "leave it out: devices='auto' takes all GPUs, devices=[2, 3] these",
        "checkpoint_callback": "write enable_checkpointing={value}, or callbacks=[ModelCheckpoint(...)]",
        "default_save_path output_dir save_dir": "write default_root_dir={value}",
        "distributed_backend": "write strategy={value}",
        "early_stop_callback early_stopping": "write callbacks=[EarlyStopping(monitor=...)]",
        "flush_logs_every_n_steps": "write logger=CSVLogger('logs', flush_logs_every_n_steps={value})",
        "gpus num_gpus": "write accelerator='gpu', devices={value}; for none accelerator='cpu'",
        "hpus": "HPUs are not offered",
        "ipus": "IPUs are not offered",
        "log_gpu_memory": "give callbacks=DeviceStatsMonitor()",
        "max_nb_epochs epochs n_epochs num_epochs num_train_epochs": "write max_epochs={value}",
        "min_nb_epochs": "write min_epochs={value}",
        "multiple_trainloader_mode": "give fit a CombinedLoader(loaders, mode={value}) of fabricamp.data",
        "nb_gpu_nodes": "write num_nodes={value}",
        "num_processes": "write devices={value}, with accelerator='cpu' or 'gpu'",
        "overfit_pct": "write overfit_batches={value}",
        "print_nan_grads": "write nan_policy='raise', which names the parameter",
        "process_position": "leave it out: one bar is drawn",
        "progress_bar_refresh_rate": "write enable_progress_bar=False for none; the bar is drawn by time, not by batches",
        "replace_sampler_ddp": "write use_distributed_sampler={value}",
        "resume_from_checkpoint checkpoint ckpt_path resume": "call fit(..., ckpt_path={value})",
        "row_log_interval log_interval logging_steps": "write log_every_n_steps={value}",
        "stochastic_weight_avg": "give callbacks=StochasticWeightAveraging(swa_lrs=...)",
        "terminate_on_nan": "write nan_policy='raise' (or 'stop', which saves a checkpoint)",
        "test_percent_check": "write limit_test_batches={value}",
        "tpu_cores": "TPUs are not offered",
        "track_grad_norm": "give callbacks=GradientMonitor()",
        "train_percent_check": "write limit_train_batches={value}",
        "truncated_bptt_steps": "set automatic_optimization = False, and step for each piece in training_step",
        "use_amp amp mixed_precision": "write precision='16-mixed' or 'bf16-mixed'",
        "val_percent_check": "write limit_val_batches={value}",
        "weights_save_path": "write callbacks=[ModelCheckpoint(dirpath={value})]",
        "weights_summary": "write enable_model_summary=False for none, or callbacks=[ModelSummary(max_depth=2)]",
        "keep_batchnorm_fp32 loss_scale master_weights": "write precision=OptLevel('O2', {name}={value})",
        "batch_size num_workers": "give it to the DataLoader",
        "bf16": "write precision='bf16-mixed'",
        "clip_grad_norm max_grad_norm": "write gradient_clip_val={value}",
        "datamodule model module train_dataloader train_dataloaders val_dataloader val_dataloaders": (
            "give it to fit, validate, test and predict"
        ),
        "deepspeed": _SHARDED,
        "fsdp": _FSDP,
        "device": "write accelerator='gpu', devices=1; for the CPU accelerator='cpu'",
        "distributed": "write devices=2, strategy='ddp'",
        "eval_steps": "write val_check_interval='{value} steps'",
        "fp16": "write precision='16-mixed'",
        "gradient_accumulation_steps": "write accumulate_grad_batches={value}",
        "learning_rate lr lr_scheduler optimizer optimizers scheduler weight_decay": (
            "the module makes its optimizers: give it to the module, and use it in configure_optimizers"
        ),
        "log_dir logging_dir": "write default_root_dir={value}, or logger=TensorBoardLogger({value})",
        "monitor": "give it to ModelCheckpoint or EarlyStopping, in callbacks",
        "num_devices": "write devices={value}",
        "num_steps steps total_steps": "write max_steps={value}",
        "patience": "write callbacks=[EarlyStopping(monitor=..., patience={value})]",
        "save_top_k": "write callbacks=[ModelCheckpoint(monitor=..., save_top_k={value})]",
        "seed": "call fabricamp.seed_everything({value})",
        "use_cuda": "write accelerator='gpu'",
        "world_size": "write devices= (on each node) and num_nodes=",
    },
    "precision": {
        "amp float16 fp16 half mixed": "write '16-mixed' (autocast over fp32 weights) or '16-true' (half weights)",
        "bfloat16": "write 'bf16-mixed' (autocast over fp32 weights) or 'bf16-true' (bfloat16 weights)",
        "double float64 fp64": "write '64-true'",
        "float float32 fp32 full": "write '32-true'",
        "fp8 transformer-engine*": "8-bit floats are not offered",
    },
    "FSDP": {
        "activation_checkpointing_policy": "write activation_checkpointing=[...] with classes",
        "auto_wrap_policy": "write units=[...] with the classes of the repeated layers",
        "cpu_offload offload_policy": "write offload=True",
        "data_parallel_size device_mesh": "write replicate= with the number of copies of the module (1: all ranks share one)",
        "mixed_precision": "write Trainer(precision=...)",
        "tensor_parallel_size": "write tensor_parallel=, and parallelize= with the function that splits layers",
        "save_distributed_checkpoint state_dict_type": "leave it out: a checkpoint is a folder that all ranks write",
        "sharding_strategy": "write reshard_after_forward='zero3' (FULL_SHARD) or 'zero2' (SHARD_GRAD_OP)",
    },
    "strategy": {
        "colossalai ddp_sharded* deepspeed* model_parallel": _SHARDED,
        "fsdp_* fsdp2": _FSDP,
        "ddp2 horovod": "write 'ddp'",
        "ddp_cpu": "write strategy='ddp', accelerator='cpu'",
        "dp": "write 'ddp': a process for each GPU, where 'dp' had threads",
        "tpu* xla*": "TPUs are not offered",
    },
    "accelerator": {
        "ddp*": "write strategy={value}",
        "dp": "write strategy='ddp'",
        "hpu ipu npu xpu": "only CPUs and CUDA GPUs are offered: write 'cpu', 'gpu' or 'auto'",
        "mps": "Apple's GPUs are not offered: a Mac runs accelerator='cpu', which 'auto' chooses there",
        "tpu xla": "TPUs are not offered: write 'cpu', 'gpu' or 'auto'",
    },
    "profiler": {
        "advanced": "run python -m cProfile, or write 'pytorch'",
        "xla": "TPUs are not offered",
    },
    "configuration": {
        "datamodule": "write data",
        "lr": "write module.lr",
        "lr_scheduler optimizer optimizers scheduler": (
            "the module makes its optimizers, so their options are arguments of its own: write module.lr=0.1"
        ),
        "model": "write module",
        "seed_everything": "write seed",
    },
    "ModelCheckpoint": {
        "filepath": "write dirpath= for the folder and filename= for the file",
        "period every_n_val_epochs": "write every_n_epochs={value}",
        "prefix": "put it into filename, as in filename='NAME-{{epoch}}'",
        "save_best_only": "write monitor='val_loss', save_top_k=1",
        "every_n_batches every_n_steps": "write every_n_train_steps={value}",
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
        "foreach fused": "leave it out: all tensors are updated in one pass",
        "learning_rate": "write lr={value}",
    },
    "self.log": {
        "loss": "give a name and a value, as in self.log('loss', loss)",
        "progress_bar": "write prog_bar=",
        "reduce sync_dist_op": "write reduce_fx=",
        "step": "leave it out: values belong to trainer.global_step",
        "tbptt_pad_token tbptt_reduce_fx": "leave it out",
        "weight": "write batch_size=",
    },
}
"""Maps where a name was given, and the names or patterns separated by spaces, to the hint what to do instead.

``*`` in a pattern matches any rest; a hint may hold ``{name}`` and ``{value}`` of the given argument.
"""

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    where: {name: words for names, words in rows.items() for name in names.split()} for where, rows in _ROWS.items()
}
"""The same table with one entry per name or pattern."""
