"""Give a run of a study up by hand, or take that back."""

from launch.slurm import cancel
from launch.study.slurm_queue import JobList
from launch.study.state import States
from torchtitan_ext.errors import UserError
from torchtitan_ext.study import Plan, write_record
from torchtitan_ext.study.dropped import drop_run, take_back


def drop(plan: Plan, name: str, reason: str) -> None:
    """Record that the run called ``name`` is given up, and cancel its job where it has one of its own.

    Raises ``UserError`` where the run has a result, which cannot be dropped, or is being trained outside of Slurm.
    """
    jobs = JobList(plan.study.folder).others()
    state = States().look(plan.runs, frozenset(jobs))[name]
    if state.ended:
        raise UserError(f"{name} is {state.state} at step {state.step}; only runs without a result can be dropped")
    job = jobs[name][0] if name in jobs else None
    shared = [other for other, (its_job, _) in jobs.items() if its_job == job and other != name]
    if state.holder is not None and (job is None or shared):
        raise UserError(
            f"{name} is being trained by {state.holder}; stop that first (`kill -TERM {state.holder.pid}` there saves "
            "it), then drop it"
        )
    write_record(plan)
    drop_run(plan.study.folder, name, reason)
    print(f"{name} is dropped at step {state.step}: {reason}")
    if job is not None and not shared:
        cancel(job)
        print(f"its job {job} is cancelled")


def undo(plan: Plan, name: str) -> None:
    """Take it back. Raises ``UserError`` where the run was not dropped."""
    take_back(plan.study.folder, name)
    print(f"{name} is no longer dropped; `depth study run` goes on with it")
