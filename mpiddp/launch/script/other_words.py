"""Others' words, and what to type for them: options of launchers and of trainers, and commands.

The tables of options in docs/coming-from-torchrun.md have the same rows; they are read only for
an error message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from mpiddp.options.checks import did_you_mean

HOSTS = "`--hosts HOST:N,…` or `--hostfile FILE`; a scheduler's job knows its hosts"
LAUNCHER_KNOWS = "nothing: MPI knows the ranks, and the address is found"
BATCH = "nothing: give it to sbatch or salloc"
BIND = "`--bind cores`, `--bind numa` or `--bind none`"
TORCHRUN = {
    "`--nproc-per-node N`, `gpu`, `auto`": (
        "`-n N` or `-n auto`, or on several machines `--ranks-per-node N`"
    ),
    "`--nnodes N`, `--nnodes MIN:MAX`": (
        "`--nodes N`, in a scheduler's job or with `--hosts`, and `--min-nodes MIN` "
        "beside `--restarts`"
    ),
    "`-m`, `--module`": "`-m MODULE`",
    "`--max-restarts N`": "`--restarts N`",
    "`--standalone`, `--rdzv-backend`, `--rdzv-endpoint`, `--rdzv-id`, `--rdzv-conf`, "
    "`--node-rank`, `--master-addr`, `--master-port`": LAUNCHER_KNOWS,
    "`--local-addr`": "`--interface NAME`",
    "`--log-dir DIR`, `--redirects`, `--tee`": "`--log-dir DIR`",
    "`--local-ranks-filter LIST`": "`--console LIST`",
    "`--numa-binding`": "`--bind numa` or `--bind cores`",
    "`--signals-to-handle`": "nothing: signals reach the ranks",
    "`--shutdown-timeout`": "nothing: in a Slurm job the time is Slurm's `KillWait`",
    "`--monitor-interval`, `--start-method`": (
        "nothing: a rank that ends is noticed at once, and each rank is a process"
    ),
    "`--run-path`": "nothing: a script runs as by `python SCRIPT`",
    "`--no-python`": "nothing: start the program with mpirun or srun",
    "`--use-env`": "nothing: `LOCAL_RANK` is a variable, and no argument",
    "`--virtual-local-rank`": (
        "nothing: each rank sees all GPUs of its node, and `LOCAL_RANK` counts them"
    ),
    "`--role`, `--event-log-handler`, `--logs-specs`, `--duplicate-stdout-filters`, "
    "`--duplicate-stderr-filters`": "nothing: there is no counterpart",
}
ACCELERATE = {
    "`--num_processes N`": "`-n N`, the number on all machines together",
    "`--num_machines N`": "`--nodes N`, in a scheduler's job or with `--hosts`",
    "`--machine_rank`, `--main_process_ip`, `--main_process_port`, `--same_network`, "
    "`--rdzv_backend`": LAUNCHER_KNOWS,
    "`--multi_gpu`, `--cpu`, `--use_deepspeed`, `--use_fsdp`, `--dynamo_backend`, `--zero_stage`, "
    "`--deepspeed_config_file`, `--gradient_accumulation_steps`, `--gradient_clipping`": (
        "nothing: the script says so in `Accelerator(…)`"
    ),
    "`--enable_cpu_affinity`": BIND,
    "`--gpu_ids LIST`": "`--devices LIST`",
    "`--num_cpu_threads_per_process N`": "`OMP_NUM_THREADS=N` before the command",
    "`--mixed_precision TYPE`": (
        "`ACCELERATE_MIXED_PRECISION=TYPE` before the command, or `Accelerator(mixed_precision=…)`"
    ),
    "`--config_file FILE`": "nothing: the file is not read",
    "`--max_restarts N`": "`--restarts N`",
    "`--log_dir DIR`, `--tee`": "`--log-dir DIR`",
    "`-m`, `--module`": "`-m MODULE`",
}
MPIRUN = {
    "`-np N`, `--np N`, `--n N`": "`-n N`",
    "`-N N`, `--npernode N`, `-npernode`, `-ppn N`, `--ppn N`, `-perhost N`": (
        "`--ranks-per-node N`, in a scheduler's job or with `--hosts`"
    ),
    "`-hostfile`, `--machinefile`, `-machinefile`, `-f`, `--host LIST`, `-host`, `-hosts`, "
    "`-H`": HOSTS,
    "`-x NAME=VALUE`, `-genv NAME VALUE`, `--genv`, `-env`, `--env`": (
        "`NAME=VALUE` before the command: all variables reach the ranks"
    ),
    "`-genvall`, `--genvall`, `-envall`, `--envall`, `-genvlist`, `-envlist`": (
        "nothing: all variables reach the ranks"
    ),
    "`--oversubscribe`, `--nooversubscribe`, `--allow-run-as-root`, `--use-hwthread-cpus`": (
        "nothing: `-n N` starts N ranks, also more than there are cores, and as root"
    ),
    "`--bind-to`, `-bind-to`, `--map-by`, `-map-by`, `--rank-by`, `--report-bindings`, `--depth`": (
        BIND
    ),
    "`--mca NAME VALUE`, `-mca`, `--prtemca`, `--pmixmca`": (
        '`--launcher-options "--mca NAME VALUE"`'
    ),
    "`-l`, `--tag-output`, `--prepend-rank`, `-prepend-rank`": "`--label`",
    "`--output-filename NAME`, `-outfile-pattern`, `-errfile-pattern`": "`--log-dir DIR`",
    "`--wdir DIR`, `-wdir`, `-wd`": "`cd DIR` before the command",
    "`--prefix DIR`": "`MPIDDP_MPIRUN=DIR/bin/mpirun` before the command",
    "`--iface NAME`, `-iface NAME`": "`--interface NAME`",
    "`-bootstrap`, `-launcher`, `-rmk`": "`--launcher mpirun` or `--launcher srun`",
}
HOROVODRUN = {
    "`-np N`, `--num-proc N`": "`-n N`",
    "`-H LIST`, `-hostfile FILE`": HOSTS,
    "`--min-np N`, `--max-np N`, `--min-num-proc N`, `--max-num-proc N`, `--reset-limit N`, "
    "`--host-discovery-script`, `--slots-per-host`": (
        "`--restarts N`, on several machines with `--min-nodes N`"
    ),
    "`--network-interfaces NAME`": "`--interface NAME`",
    "`--start-timeout SECONDS`": "`--timeout SECONDS`",
    "`--output-filename NAME`": "`--log-dir DIR`",
    "`--gloo`, `--autotune`, `--timeline-filename`, `--fusion-threshold-mb`, `--cycle-time-ms`": (
        "nothing: it is Horovod's own"
    ),
}
DEEPSPEED = {
    "`--num_gpus N`": "`-n N`",
    "`--num_nodes N`": "`--nodes N`, in a scheduler's job or with `--hosts`",
    "`--include SPEC`, `--exclude SPEC`": "`--devices LIST`, the GPUs of each node",
    "`--master_addr`, `--master_port`, `--node_rank`, `--no_ssh`, `--no_ssh_check`, `--ssh_port`, "
    "`--launcher_args`, `--force_multi`": LAUNCHER_KNOWS,
    "`--elastic_training`, `--min_elastic_nodes N`, `--max_elastic_nodes N`": (
        "`--restarts N`, on several machines with `--min-nodes N`"
    ),
    "`--bind_cores_to_rank`, `--bind_core_list`": BIND,
    "`--enable_each_rank_log DIR`": "`--log-dir DIR`",
    "`--module`": "`-m MODULE`",
    "`--no_python`": "nothing: start the program with mpirun or srun",
    "`--no_local_rank`": "nothing: `LOCAL_RANK` is a variable, and no argument",
    "`--autotuning`, `--save_pid`, `--venv_script`": "nothing: there is no counterpart",
}
SRUN = {
    "`--nodes N`, `-N N`": "`--nodes N`",
    "`--ntasks N`": "`-n N`",
    "`--ntasks-per-node N`": "`--ranks-per-node N`",
    "`--gpus N`, `-G N`, `--gpus-per-node N`, `--gpus-per-task N`, `--gres gpu:N`": (
        "`-n N`, a rank for each GPU; in a Slurm job nothing: give it to sbatch or salloc"
    ),
    "`--cpus-per-task`, `-c`, `--cpus-per-gpu`, `--mem`, `--mem-per-cpu`, `--mem-per-gpu`, "
    "`--time`, `-t`, `--partition`, `-p`, `--account`, `-A`, `--qos`, `-q`, `--constraint`, `-C`, "
    "`--reservation`, `--nodelist`, `-w`, `--exclude`, `-x`, `--exclusive`, `--job-name`, `-J`, "
    "`--array`, `--dependency`, `-d`, `--begin`, `--comment`, `--licenses`, `--switches`, "
    "`--mail-type`, `--mail-user`, `--threads-per-core`": BATCH,
    "`--mpi TYPE`": "nothing, or type `MPIDDP_PMI=TYPE` before the command",
    "`--kill-on-bad-exit`, `-K`, `--export`": "nothing: both are on",
    "`--output FILE`, `-o`, `--error FILE`, `-e`": (
        "`--job-log DIR` for all ranks together, or `--log-dir DIR` for each"
    ),
    "`--label`, `-l`": "`--label`",
    "`--cpu-bind`": BIND,
    "`--chdir DIR`, `-D`": "`cd DIR` before the command",
    "`--container-image`, `--container-mounts`, `--distribution`, `--exact`, `--gpu-bind`, "
    "`--hint`, `--mem-bind`, `--network`, `--overlap`, `--pty`, `--unbuffered`, and any other": (
        '`--launcher-options "…"`'
    ),
}
PYTHON = {
    "`-c CODE`": "a file's name: each rank reads the script by itself",
    "`-i`": "nothing: ranks have no terminal to read from; `mpiddp.ranks` calls functions on ranks",
    "`-u`, `-O`, `-X OPTION`, `-W ACTION`": "it before `-m mpiddp`: the ranks get it too",
}
LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "python": PYTHON,
    "torchrun": TORCHRUN,
    "accelerate launch": ACCELERATE,
    "mpirun": MPIRUN,
    "horovodrun": HOROVODRUN,
    "deepspeed": DEEPSPEED,
    "srun": SRUN,
}
"""By the name of the launcher; each row in Markdown: its options, and what to type."""
TRAINER = {
    "`--amp`, `--use_amp`, `--mixed_precision TYPE`, `--bf16`, `--dtype TYPE`": (
        "`--precision bf16`, or `--precision fp16` on GPUs"
    ),
    "`--fp16`, `--half`": "`--precision fp16` on GPUs, or `--precision bf16`",
    "`--num_epochs N`, `--num_train_epochs N`, `--max_epochs N`, `--n_epochs N`": "`--epochs N`",
    "`--max_steps N`, `--max_train_steps N`, `--num_steps N`, `--total_steps N`, `--max_iters N`": (
        "`--epochs N`; a script with mpiddp.training.Trainer may leave its loop after any step"
    ),
    "`--per_device_train_batch_size N`, `--train_batch_size N`, `--micro_batch_size N`, `--bs N`, "
    "`-b N`": "`--batch-size N`, samples per rank and step",
    "`--global_batch_size N`, `--total_batch_size N`": (
        "`--batch-size N`, N divided by the number of ranks"
    ),
    "`--eval_batch_size N`, `--per_device_eval_batch_size N`, `--test_batch_size N`, "
    "`--val_batch_size N`": "nothing: evaluations take `--batch-size`",
    "`--auto_find_batch_size`": "`--batch-size auto`",
    "`--gradient_accumulation_steps N`, `--accumulate_grad_batches N`, `--accum_iter N`, "
    "`--grad_accum_steps N`": "`--accumulation-steps N`, into which `--batch-size` is cut",
    "`--lr X`, `--base_lr X`, `--max_lr X`": "`--learning-rate X`",
    "`--opt NAME`, `--optim NAME`": "`--optimizer NAME`",
    "`--wd X`": "`--weight-decay X`",
    "`--lr_scheduler NAME`, `--lr_scheduler_type NAME`, `--scheduler NAME`, `--sched NAME`": (
        "`--schedule NAME`"
    ),
    "`--step_size N`, `--lr_step_size N`": "`--schedule step --step-epochs N`",
    "`--gamma X`, `--lr_gamma X`": "`--schedule step --step-factor X`",
    "`--warmup N`, `--warmup_steps N`, `--warmup_ratio X`, `--lr_warmup_epochs N`": (
        "`--warmup-epochs X`"
    ),
    "`--max_grad_norm X`, `--grad_clip X`, `--clip_grad X`, `--clip_grad_norm X`, "
    "`--gradient_clip_val X`": "`--clip-norm X`",
    "`--model_ema`, `--model_ema_decay X`, `--ema_decay X`": "`--ema X`",
    "`--label_smoothing_factor X`, `--smoothing X`": "`--label-smoothing X`",
    "`--random_seed N`, `--manual_seed N`, `--global_seed N`": "`--seed N`",
    "`--arch NAME`, `-a NAME`, `--model_name NAME`, `--model_name_or_path NAME`, `--net NAME`": (
        "`--model NAME`, or `--model package.module:factory`"
    ),
    "`--pretrained`, `--pretrained_weights PATH`, `--init_from PATH`, `--load_weights PATH`": (
        "`--weights PATH`"
    ),
    "`--dataset NAME`, `--dataset_name NAME`": "`--data NAME`, or `--data package.module:factory`",
    "`--data_path DIR`, `--data_root DIR`, `--dataset_dir DIR`, `--train_dir DIR`": (
        "`--data-dir DIR`"
    ),
    "`--num_workers N`, `--dataloader_num_workers N`, `-j N`": "`--workers N`",
    "`--img_size N`, `--input_size N`, `--crop_size N`, `--resolution N`": "`--image-size N`",
    "`--seq_len N`, `--seq_length N`, `--max_seq_length N`, `--block_size N`": "`--context N`",
    "`--output_dir DIR`, `--out_dir DIR`, `--save_dir DIR`, `--default_root_dir DIR`, "
    "`--work_dir DIR`, `--output DIR`": "`--runs-dir DIR --name NAME`; the run is DIR/NAME",
    "`--run_name NAME`, `--exp_name NAME`, `--experiment_name NAME`, `--experiment NAME`": (
        "`--name NAME`"
    ),
    "`--overwrite_output_dir`": "another `--name`: a finished run is not overwritten",
    "`--model_dir DIR`, `--model_filename FILE`, `--model_path FILE`, `--save_path FILE`, "
    "`--save_model`": "`--export DIR/FILE.pt`, for the trained weights",
    "`--ckpt PATH`, `--ckpt_path PATH`, `--checkpoint PATH`, `--resume_from PATH`, "
    "`--resume_from_checkpoint PATH`, `--load_checkpoint PATH`": "`--resume PATH`",
    "`--ckpt_dir DIR`, `--checkpoint_path DIR`, `--snapshot_path DIR`": "`--checkpoint-dir DIR`",
    "`--save_steps N`, `--save_strategy`, `--save_interval N`, `--save_freq N`, "
    "`--checkpoint_interval N`, `--checkpoint_every N`, `--checkpointing_steps N`": (
        "`--save-every Nsteps`, `--save-every Nepochs` or `--save-every Nmin`"
    ),
    "`--save_total_limit N`, `--save_top_k N`": "`--keep N`",
    "`--eval_steps N`, `--eval_strategy`, `--evaluation_strategy`, `--eval_interval N`, "
    "`--eval_every N`, `--eval_freq N`, `--val_check_interval N`, `--check_val_every_n_epoch N`": (
        "`--evaluate-every N`, in epochs"
    ),
    "`--evaluate`, `--eval`, `--eval_only`, `--do_eval`, `--test`, `--test_only`, `-e`": (
        "`--evaluate-only --weights PATH`"
    ),
    "`--do_predict`": "`--evaluate-only --weights PATH --predict FILE.npy`",
    "`--do_train`, `--train`": "nothing: train is the command",
    "`--logging_steps N`, `--log_interval N`, `--log_every_n_steps N`, `--log_freq N`, "
    "`--print_freq N`, `-p N`": "`--log-every N`",
    "`--wandb`, `--use_wandb`, `--wandb_project NAME`, `--report_to NAME`, `--logger NAME`, "
    "`--with_tracking`, `--tensorboard`, `--mlflow`": (
        "`--track wandb`, `--track tensorboard` or `--track mlflow`"
    ),
    "`--profiler NAME`": "`--profile RANKS`",
    "`--gradient_checkpointing`, `--grad_checkpointing`, `--checkpoint_activations`": (
        "`--activation-checkpointing`"
    ),
    "`--strategy NAME`, `--ddp`, `--fsdp`, `--deepspeed FILE`, `--distributed`, `--zero_stage N`": (
        "`--parallel ddp` or `--parallel fsdp`"
    ),
    "`--ddp_bucket_cap_mb MB`, `--bucket_cap_mb MB`": "`--bucket-mb MB`",
    "`--torch_compile`, `--use_compile`": "`--compile`",
    "`--full_determinism`, `--use_deterministic_algorithms`": "`--deterministic`",
    "`--device NAME`, `--accelerator NAME`, `--gpu N`, `--gpu_ids LIST`, `--cuda`, `--use_cuda`, "
    "`--no_cuda`, `--cpu`, `--use_cpu`": ("`--devices cuda`, `--devices cpu` or `--devices LIST`"),
    "`--nodes N`, `--num_nodes N`, `--gpus N`, `--num_gpus N`": (
        "`-n N` before `train`: `python -m mpiddp -n N train`"
    ),
    "`--rank N`, `--local_rank N`, `--world_size N`, `--master_addr`, `--master_port`, "
    "`--dist_url URL`, `--init_method URL`": LAUNCHER_KNOWS,
    "`--dist_backend NAME`, `--ddp_backend NAME`": "`--backend NAME`",
    "`--ddp_timeout SECONDS`": "`--timeout SECONDS`",
    "`--config_file FILE`, `--cfg FILE`, `-c FILE`": "`--config FILE`, in TOML",
}
"""Options of other trainers, such as Lightning's, transformers' and torchvision's scripts."""
OTHER_COMMANDS = {
    "`allreduce`, `reduce-scatter`, `all-gather`, `broadcast`, `reduce`, `point-to-point`, "
    "`all-pairs`, `startup`, `training-step`, `training-loop`, `programs`, `stragglers`, "
    "`fit`, `simulate`, `tune`, `compare`, `report`, `explain`, `prove`, `numerics`": (
        "`python -m mpiddp bench COMMAND`"
    ),
    "`run`, `launch`, `torchrun`, `mpirun`, `mpiexec`, `srun`, `python`": (
        "`python -m mpiddp -n N SCRIPT`"
    ),
    "`eval`, `evaluate`, `test`, `predict`": "`train --evaluate-only --weights RUN`",
    "`resume`": "`train --resume RUN`",
    "`env`, `check`, `diagnose`, `info`": "`doctor`",
    "`status`, `ps`, `top`, `pystack`, `py-spy`": "`stacks`",
    "`benchmark`, `benchmarks`": "`bench`",
    "`version`": "`--version`",
    "`help`": "`--help`",
}
"""Words in place of a script."""


def explain(option: str, rows: Mapping[str, Mapping[str, str]] = LAUNCHERS) -> str | None:
    """What to do instead of ``option``, if others have it, by default launchers.

    ``_`` may stand for ``-``, and a number may follow a short option at once, as in ``-N2``.
    """
    name = re.sub(r"(?<=^-[A-Za-z])[\d:]+$", "", option.replace("_", "-"))
    owners: dict[str, list[str]] = {}
    for owner, each in rows.items():
        for text in _find(name, each):
            owners.setdefault(text, []).append(owner)
    if not owners:
        return None
    parts = [(_join(found), _tell(text)) for text, found in owners.items()]
    launcher, advice = parts[0]
    others = "".join(f"; as an option of {other}, {each}" for other, each in parts[1:])
    return f"{option} is an option of {launcher}; for mpiddp, {advice}{others}"


def explain_training(option: str) -> str | None:
    """The same of an option that other trainers have."""
    for text in _find(option.replace("_", "-"), TRAINER):
        return f"{option} is an option of other trainers; for mpiddp, {_tell(text)}"
    return explain(option)


def explain_command(word: str, commands: Iterable[str]) -> str:
    """What to type for ``word`` in place of a script, in parentheses; ``commands``: those of
    mpiddp. Empty if nothing comes near."""
    measuring = re.findall(r"`([\w-]+)`", next(iter(OTHER_COMMANDS)))
    for words, text in OTHER_COMMANDS.items():
        if f"`{word}`" in words:
            return f" (for mpiddp, {_tell(text).replace('COMMAND', word)})"
    hint = did_you_mean(word, [*commands, *measuring])
    return re.sub(rf"mean ({'|'.join(measuring)})\?", r"mean bench \1?", hint)


def _find(name: str, rows: Mapping[str, str]) -> Iterator[str]:
    for options, text in rows.items():
        if name in re.findall(r"`(--?[A-Za-z][\w-]*)", options.replace("_", "-")):
            yield text


def find_flags(text: str) -> set[str]:
    """The options that are to be typed: ``--ranks`` of ```--ranks N```."""
    return set(re.findall(r"`(--[\w-]+)", text))


def _join(names: list[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _tell(text: str) -> str:
    return f"type {text}".replace("`", "").replace("type nothing", "leave it out")
