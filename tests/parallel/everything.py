"""Every kind of model, clipping, way to fine-tune and precision on several processes, against one; as a program.

``python -m tests.parallel.everything [WORD]`` runs the cases whose name has the word in it; it prints a line for each and ends
with status 1 where any failed.
"""

import itertools
import sys
import tempfile
from pathlib import Path

from dpexp.parallel import Ranks
from dpexp.parallel.sharded import shard
from tests.parallel.cases import Case, check_same, run
from tests.parallel.pool import run_ranks


def cases(word: str = "") -> list[Case]:
    product = itertools.product(
        ("mlp", "gpt2", "vit", "llama"),
        ("flat", "layer", "adaptive", "device"),
        ("full", "lora"),
        ("fp32", "bf16"),
        (1, 3),
    )
    return [case for case in (Case(*values) for values in product) if word in str(case) and exists(case)]


def exists(case: Case) -> bool:
    """Has the model parts of its own for two devices? A perceptron has no blocks, and GPT-2's ends are one weight that trains."""
    return (
        case.clip != "device" or case.model in ("vit", "llama") or (case.model, case.peft) == ("gpt2", "lora")
    )


def together(ranks: Ranks, folder: Path, chosen: list[Case], sharded: bool):
    wrap = shard if sharded else None
    return [run(case, folder / str(case), wrap, ranks=ranks.size) for case in chosen]


def main(word: str = "") -> int:
    chosen, failed = cases(word), 0
    with tempfile.TemporaryDirectory() as name:
        alone = [run(case, Path(name) / "alone" / str(case)) for case in chosen]
        for size, sharded in itertools.product((2, 4), (False, True)):
            place = Path(name) / f"{size}{sharded}"
            place.mkdir()
            for results in run_ranks(size, place, together, place, chosen, sharded)[:1]:
                for case, found, expected in zip(chosen, results, alone, strict=True):
                    try:
                        check_same(found, expected, case)
                        ending = "equal"
                    except AssertionError as error:
                        failed, ending = failed + 1, f"DIFFERS: {error}"
                    print(f"{'fsdp' if sharded else 'ddp'} on {size}: {case}: {ending}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
