"""PyTorch's own DistributedDataParallel on a job of ours, as the peer that `compare` puts next to the strategies.

It trains the same network on the same batches with the same optimizer, schedule and objective as `synchronous`,
through `torch.nn.parallel.DistributedDataParallel` over gloo, a process each worker, and leaves an ordinary run
folder. Where every worker has a full batch its steps are those of `synchronous` but for the order of sums; the batches
of a ragged last step count equally there, whatever their sizes, as they do for every user of DDP.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from polyrhythm.api.observed_run import Run, choose_folder, create_folder_for, observed_run_in
from polyrhythm.config.assemble import assemble, default_optimizer, strategy_from
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.image_size import with_image_size
from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import RunConfig, RunOptions
from polyrhythm.config.stages import Stages
from polyrhythm.data.loader import Loader, Share
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import RequestError, RunError
from polyrhythm.evaluation.evaluate import Evaluation, evaluate
from polyrhythm.events import Evaluated, Event, Notice, RunEnded, RunStarted, WorkerProgress
from polyrhythm.launch.devices import available_cores, threads_for_worker
from polyrhythm.models.fine_tuning import graded
from polyrhythm.models.weights import save_weights
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.result import digest, test_figures
from polyrhythm.specs import parse
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.forward_pass import Precision, by_running_statistics

NAME = "ddp"


def train_with_ddp(out: str | Path | None = None, **options: Unpack[RunOptions]) -> Run:
    """Train a job with DistributedDataParallel, in processes of its own.

    Args:
        out: the run folder, new or empty; None: a new one under `runs/`.
        **options: options of `train`; `strategy` may be omitted.

    Raises:
        RequestError: the request is wrong, or asks for something that DDP has not.
        RunError: a process failed.
    """
    config = with_image_size(configure(options)).model_copy(update={"strategy": "synchronous"})
    _check(config)
    job = assemble(config, CheckpointConfig())
    folder = choose_folder(out, f"{NAME}-{job.model_name.split('(')[0]}")
    chosen = {"strategy": NAME, "epochs": job.learning.epochs, "optimizer": str(job.learning.optimizer)}
    config = config.model_copy(update=chosen)
    claim = create_folder_for(folder, config, str(job.device), job.dataset)
    with observed_run_in(folder, config, (), claim) as observed:
        observed.on_event(_opening(job))
        _run(job, config.threads, observed.on_event, folder)
    return observed.run()


def _check(config: RunConfig) -> None:
    if config.device not in {"auto", "cpu"} or (config.device == "auto" and torch.cuda.is_available()):
        raise RequestError("ddp is compared on the CPU, over gloo: give --device cpu")
    if config.weight_average or config.freeze_epochs is not None or config.listen is not None:
        raise RequestError("ddp has no --weight-average, --freeze-epochs or --listen: leave them out")
    if config.svrg != "none":
        raise RequestError("ddp has no --svrg: leave it out")
    if config.accumulate > 1:
        raise RequestError(
            "ddp computes a batch at once: give the whole of it as --batch-size, without --accumulate"
        )


def _opening(job: Job) -> RunStarted:
    return RunStarted(
        time_s=0.0,
        strategy=NAME,
        data=job.dataset.name,
        model=job.model_name,
        workers=job.workers,
        servers=0,
        epochs=job.learning.epochs,
        steps_per_epoch=job.steps_per_epoch,
        steps=job.calendar.total_steps,
        parameters=job.numbers,
    )


def _run(job: Job, threads: int | None, emit: Callable[[Event], None], folder: Path) -> None:
    """Run the processes, and forward the first one's events."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # DDP imports torch's compiler, which a fork may not
    results, notify = context.Pipe(duplex=False)
    threads = threads or threads_for_worker(available_cores(), job.workers, job.strategy)
    ranks = [
        context.Process(target=_rank, args=(rank, job, port, threads, notify, folder), daemon=True)
        for rank in range(job.workers)
    ]
    for process in ranks:
        process.start()
    notify.close()
    try:
        ended = False
        while not ended:
            ready = wait_for([results, *(process.sentinel for process in ranks)])
            if results in ready:
                with suppress(EOFError):
                    event = results.recv()
                    if isinstance(event, Exception):
                        raise event
                    emit(event)
                    ended = isinstance(event, RunEnded)
                    continue
            failed = next((rank for rank, process in enumerate(ranks) if process.exitcode), None)
            if failed is not None:
                raise RunError(f"rank {failed} of ddp ended with status {ranks[failed].exitcode}")
    finally:
        for process in ranks:
            process.join(5 if ended else 0)
            if process.is_alive():
                process.kill()
            process.join()
        results.close()


def _rank(rank: int, job: Job, port: int, threads: int, notify: Connection, folder: Path) -> None:
    """One worker."""
    try:
        torch.set_num_threads(threads)
        distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.workers
        )
        _train(rank, job, notify.send if rank == 0 else _ignore, folder)
        distributed.destroy_process_group()
    except (RequestError, RunError) as error:
        notify.send(error)
        os._exit(1)


def _ignore(event: Event) -> None:
    """Drop the other ranks' events: they repeat the first one's."""


def _train(rank: int, job: Job, emit: Callable[[Event], None], folder: Path) -> None:
    learning, dataset, workers = job.learning, job.dataset, job.workers
    torch.manual_seed(learning.seed)
    bare = job.make_model()
    optimizer = learning.optimizer.create(graded(bare, learning.optimizer.lr, learning.rate_decay))
    rates = [group["lr"] / learning.optimizer.lr for group in optimizer.param_groups]
    model = DistributedDataParallel(bare)
    precision = Precision.choose(learning.precision, job.device)
    share = Share(rank, workers, learning.batch_size, learning.seed)
    loader = Loader(dataset.train, share, learning.transform, job.ahead, learning.mixer, learning.label_skew)
    distributed.barrier()
    began_s, tested_s, images_of_all, step, last_loss = time.monotonic(), 0.0, 0, 0, math.nan
    found: Evaluation | None = None
    reached = False
    for epoch in range(learning.epochs):
        model.train()
        size = job.calendar.batch_size(epoch)
        dealt = job.calendar.dealt[epoch]
        loader.share = Share(rank, workers, size, learning.seed, workers * size, images=dealt)
        image_size = min(dataset.image_shape[1:])
        side = learning.size_schedule.side(epoch, learning.epochs, image_size)
        loader.side = None if side == image_size else side
        objective = learning.objective.at(epoch, learning.epochs)
        steps, images, loss_sum, rate = 0, 0, 0.0, 0.0
        for batch in loader.epoch(epoch, 0):
            rate = learning.optimizer.lr * learning.schedule.factor(step, job.length)
            for group, ratio in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * ratio
            torch.manual_seed(seed_for("step", learning.seed, rank, step))
            optimizer.zero_grad()
            normalizing = by_running_statistics(model) if batch.size == 1 else nullcontext()
            with precision.autocast(), normalizing:
                logits = model(batch.images)
                loss = objective(logits, batch.labels, batch.images) if batch.size else logits.sum() * 0
            value = float(loss.detach())
            if not math.isfinite(value):
                raise RequestError(f"the loss is {value} at step {step} of ddp: lower the learning rate")
            loss.backward()
            if learning.optimizer.clip_norm is not None:
                clip_grad_norm_(bare.parameters(), learning.optimizer.clip_norm)
            optimizer.step()
            step, steps, images, loss_sum = (
                step + 1,
                steps + 1,
                images + batch.size,
                loss_sum + value * batch.size,
            )
        own = torch.tensor([images, loss_sum], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(workers)]
        distributed.all_gather(gathered, own)
        per_worker = [(int(each[0]), float(each[1])) for each in gathered]
        now_s = time.monotonic() - began_s
        for worker, (of_worker, losses) in enumerate(per_worker):
            images_of_all += of_worker
            emit(
                WorkerProgress(
                    time_s=now_s,
                    worker=worker,
                    epoch=epoch,
                    step=step,
                    steps=steps,
                    images=of_worker,
                    loss=losses / of_worker if of_worker else 0.0,
                    learning_rate=rate,
                )
            )
        last_loss = sum(losses for _, losses in per_worker) / sum(count for count, _ in per_worker)
        if rank == 0:
            found = evaluate(bare, dataset.test, classes=dataset.classes, device=job.device)
            tested_s += time.monotonic() - began_s - now_s
            emit(_evaluated(found, epoch + 1, time.monotonic() - began_s))
            until = job.until
            reached = until is not None and until.reached(loss=found.loss, top1=found.top1, top5=found.top5)
        agreed = torch.tensor(int(reached))
        distributed.broadcast(agreed, src=0)
        if reached := bool(agreed):
            emit(
                Notice(time_s=time.monotonic() - began_s, text=f"ddp has reached {job.until}: training ends")
            )
            break
    if rank == 0:
        assert found is not None
        seconds = time.monotonic() - began_s
        save_weights(bare, folder / "model.safetensors", job.weight_facts)
        vector = torch.cat([parameter.detach().flatten() for parameter in bare.parameters()])
        result = {
            "run": str(folder),
            "strategy": NAME,
            "data": dataset.name,
            "model": job.model_name,
            "workers": workers,
            "servers": 0,
            "steps": step,
            "epochs": job.calendar.epochs_done(step),
            "seconds": seconds,
            "images_per_s": images_of_all / (seconds - tested_s),
            "train_loss": last_loss,
            **test_figures(found),
            "parameters_sha256": digest(vector),
            **({"reached": reached} if job.until is not None else {}),
        }
        emit(RunEnded(time_s=seconds, outcome="done", result=result))


def _evaluated(found: Evaluation, epoch: int, time_s: float) -> Evaluated:
    return Evaluated(
        time_s=time_s, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5
    )


def with_rate(options: Mapping[str, Any], rate: Any) -> dict[str, Any]:
    """Return the optimizer with another learning rate."""
    chosen = options.get("optimizer")
    if chosen is None:
        workers = configure({"workers": options["workers"]}).workers  # given as text on the command line
        chosen = default_optimizer(of_ours(str(options["strategy"])), workers)
    spec = parse(str(chosen))
    return {"optimizer": str(type(spec)(spec.name, {**spec.arguments, "lr": rate}))}


def of_ours(strategy: str) -> Strategy:
    """Return the strategy that provides a spec's defaults: `synchronous` for PyTorch's DDP, the first one for stages.

    An ensemble has those of its members.

    Raises:
        RequestError: there is no such strategy.
    """
    if (ensemble := Ensemble.parse(strategy)) is not None:
        return of_ours(ensemble.each)
    if (stages := Stages.parse(strategy)) is not None:
        return next(strategy_from(stage.strategy) for stage in stages.stages)
    return strategy_from("synchronous" if strategy == NAME else strategy)
