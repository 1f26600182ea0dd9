"""Shows whether a run's training could be repeated bit for bit."""

from __future__ import annotations

from rich.console import Console

from deltawire.display import legible, safe_line
from deltawire.rl.trainer.verify_training import NAMED, TrainingVerification


def print_verification(found: TrainingVerification, console: Console) -> None:
    """Prints the outcome, and the tensors that differ."""
    origin = f"from the state at version {found.origin}, on {found.groups} groups of the bucket"
    if found.exact:
        many = found.last - found.first + 1
        versions = "version" if many == 1 else "versions"
        console.print(
            f"{many} {versions} ({found.first} to {found.last}) repeated {origin}: "
            "all with the same bits"
        )
        return
    console.print(f"version {found.differs} is the first that differs, repeated {origin}")
    console.print(safe_line(found.reason), markup=False, emoji=False)
    worst = sorted(found.tensors.items(), key=lambda item: -item[1])
    for name, count in worst[:NAMED]:
        console.print(f"  {count} weights of {legible(name, 100)}", markup=False, emoji=False)
    if len(worst) > NAMED:
        console.print(f"  and {len(worst) - NAMED} more tensors")
