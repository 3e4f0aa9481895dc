"""torchtitan's trainer for runs that live in a run folder.

It adds what a run needs to be kept for ever: counters over all starts, held-out loss, one record across resumes, a stop
that saves, and a status that others can read.
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch.distributed.checkpoint import CheckpointException
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from data_prep.dataset import TokenDataset
from torchtitan_ext.errors import Diverged
from torchtitan_ext.orphans import stop_with_parent
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock

from .checkpoint_files import remove_unfinished
from .checkpoints import Checkpoints
from .diagnostics import look_inside
from .heldout import HeldOut
from .loader import Batch, WindowLoader
from .metrics import Progress, RunMetrics
from .parallelize import check_storages
from .ranks import Ranks


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to save and leave. A process under ``nohup`` goes on ignoring SIGHUP."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else []))


class DepthTrainer(Trainer):
    """Train one run. Raises what torchtitan raises; the folder's status says how the run ended."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        heldout_every: int = 0
        depth_every: int = 0
        heldout_tokens: int = 0
        start: Annotated[Callable | None, tyro.conf.Suppress] = None
        """Called with the rank and ``Ranks.gather`` before anything is allocated; returns the first rank's lock on the
        run folder."""

    checkpointer: Checkpoints
    dataloader: WindowLoader
    metrics_processor: RunMetrics

    def __init__(self, config: Config) -> None:
        self.lock: RunLock | None = None
        self.folder = RunFolder(config.dump_folder)
        self.train_seconds = 0.0
        self.step_began: float | None = None
        self.stop_requested = False
        self.fell_behind = False
        self.has_begun = False
        try:
            super().__init__(config)
            check_storages(self.model_parts[0])
            self.heldout = self._build_heldout() if config.heldout_every or config.depth_every else None
        except BaseException:
            self._release_lock()
            raise

    def init_distributed(self) -> ParallelDims:
        # The ranks can talk with one another from here on, and nothing is allocated yet.
        dims = super().init_distributed()
        self.ranks = Ranks()
        assert self.config.start is not None
        self.lock = self.config.start(rank=dist.get_rank(), gather=self.ranks.gather)
        if self.lock is not None:
            remove_unfinished(self.folder.checkpoint_path, logger.warning)
        return dims

    def _build_heldout(self) -> HeldOut:
        config = self.config
        return HeldOut(
            TokenDataset.open(config.dataloader.dataset_path),
            seq_len=config.training.seq_len,
            tokens=config.heldout_tokens,
            micro_batch=config.training.local_batch_size,
            document_mask=config.dataloader.document_mask,
            rank=self.dataloader.rank,
            ranks=self.dataloader.ranks,
        )

    def progress(self) -> Progress:
        running = time.perf_counter() - self.step_began if self.step_began is not None else 0.0
        tokens = self.dataloader.samples * self.config.training.seq_len
        return Progress(self.step, tokens, self.train_seconds + running, float(self._trained_flops(tokens)))

    def _trained_flops(self, tokens: int) -> int:
        changing = self.model_parts[0].changing_schedule
        if changing is None:
            return self.metrics_processor.num_flops_per_token * tokens
        return changing.trained_flops(tokens, self.config.training.global_batch_size * self.config.training.seq_len)

    def train(self) -> None:
        """Train from the newest checkpoint to the last step, or until SIGTERM, SIGINT or SIGHUP asks to stop, or until
        the run's stopping rule ends it."""
        handlers = {number: signal.signal(number, self._request_stop) for number in stopping_signals()}
        stop_with_parent()
        try:
            super().train()
            if self.step != self.checkpointer.newest:
                self.checkpointer.save(self.step, last_step=True)
            if self.fell_behind:
                self._report("diverged", self.metrics_processor.verdict)
            else:
                self._report("stopped" if self.step < self.config.training.steps else "finished")
        except (Exception, CheckpointException) as error:  # a CheckpointException is no Exception
            self._report("diverged" if isinstance(error, Diverged) else "failed", str(error) or repr(error))
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        # torchtitan asks for the batches once, after loading the checkpoint: here the step to go on from is known.
        steps = self.config.training.steps
        self.ranks.together(lambda: self.metrics_processor.attach(self.progress, steps, self._saves))
        self.has_begun = True
        self._report("running")
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        self.step_began = time.perf_counter()
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if "Loss is not finite" in str(error):  # the same sum over all ranks, so every rank is here
                raise Diverged(str(error)) from None
            raise
        changing = self.model_parts[0].changing_schedule
        if changing is not None:
            changing.after_step(self.step, self.config.training.steps, self.model_parts[0], self.ranks.together)
        if self._saves(self.step) or self._evaluates(self.step) or self._looks_inside(self.step):
            # The device may still be busy with this step; the time it takes is training time.
            utils.device_module.synchronize()
        self.train_seconds += time.perf_counter() - self.step_began
        self.step_began = None
        if self.heldout is not None and self._evaluates(self.step):
            # Before the checkpoint of this step is written: a run resumed from it has the number already.
            result = self.heldout.evaluate(self.model_parts[0], self.train_context, self.device)
            self.metrics_processor.log_heldout(self.step, result.metrics())
        if self.heldout is not None and self._looks_inside(self.step):
            numbers = look_inside(self.model_parts[0], self.heldout, self.train_context, self.device)
            self.metrics_processor.log_depth(self.step, numbers)

    def _saves(self, step: int) -> bool:
        return self.checkpointer._should_save(step, step == self.config.training.steps)

    def _evaluates(self, step: int) -> bool:
        every = self.config.heldout_every
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _looks_inside(self, step: int) -> bool:
        return self.config.depth_every > 0 and step % self.config.depth_every == 0

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        # One rank's signal stops all, and so does the stopping rule, which the first rank alone can decide.
        verdict = self.metrics_processor.verdict
        stop = torch.tensor([int(self.stop_requested), int(verdict is not None)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=self.ranks.group)
        asked, self.fell_behind = bool(stop[0]), bool(stop[1])
        if self.fell_behind:
            logger.info(f"Stopping rule: {verdict}; saving step {self.step} and leaving")
        elif asked:
            logger.info(f"Asked to stop: saving step {self.step} and leaving")
        return not asked and not self.fell_behind

    def _request_stop(self, number: int, frame: Any) -> None:
        # Ctrl-C reaches this process twice, from the terminal and from torchrun, so a second signal says nothing more.
        # torchrun kills what does not leave in time.
        self.stop_requested = True

    def _report(self, state: str, reason: str | None = None) -> None:
        if dist.get_rank() == 0:
            # Before a checkpoint is loaded the step is the one that an earlier start has come to.
            step = self.step if self.has_begun else self.folder.readable_status().get("step", 0)
            self.folder.write_status(state, step, self.config.training.steps, reason)

    def close(self) -> None:
        super().close()
        self._release_lock()

    def _release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, "train_seconds": self.train_seconds, "rng": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.train_seconds = state_dict["train_seconds"]
        torch.set_rng_state(state_dict["rng"])
        if "cuda_rng" in state_dict:
            torch.cuda.set_rng_state(state_dict["cuda_rng"])
