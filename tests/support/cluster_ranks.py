"""Small runs on several ranks: under torchrun this file trains, one after the other, the recipes that it is given."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli_process import TORCHRUN, done, started


def torchrun(*command: str, folder: Path, ranks: int = 2, launch: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A command that torchrun starts as so many processes of this machine, in `folder`."""
    launcher = [*TORCHRUN, "--nnodes", "1", "--nproc-per-node", str(ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *launch]
    return started(folder, *launcher, *command, stderr=subprocess.STDOUT, OMP_NUM_THREADS="1")


def train_on_ranks(folder: Path, recipes: Mapping[str, tuple[dict[str, Any], int]]) -> dict[str, dict[str, Any]]:
    """Train recipes, as app.recipe.to_dict gives them, each in the run directory of its name below `folder`, on two
    ranks, of which so many share a context; by name what `main` writes."""
    (folder / "cases.json").write_text(json.dumps(recipes))
    done(torchrun(__file__, str(folder / "cases.json"), folder=folder))
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def main(path: Path) -> None:
    """Every rank; the first one writes what it saw to results.json."""
    import tiny

    from penstock.app.recipes.recipe import from_dict
    from penstock.engine.cluster.ranks import joined
    from penstock.engine.cluster.train import train_cluster

    class Told(tiny.Silent):
        def on_begin(self) -> None: ...

    results = {}
    with joined() as ranks:
        for name, (tree, spread) in json.loads(path.read_text()).items():
            observer, run_dir = Told(), path.parent / name
            train_cluster(from_dict(tree), ranks, run_dir=run_dir, observer=observer, context_parallel=spread)
            results[name] = {
                "losses": [m.loss for m in observer.metrics],
                "norms": [m.grad_norm for m in observer.metrics],
                "tokens": [m.tokens for m in observer.metrics],
                "validations": [(m.step, m.loss, m.accuracy) for m in observer.validations],
                "messages": observer.messages,
            }
        if ranks.first:
            (path.parent / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
