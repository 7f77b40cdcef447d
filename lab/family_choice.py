"""Which settings learn the family of distributions best? One network for each, on a screen that reports nothing.

    python lab/family_choice.py --out FOLDER [--choices "noise .02" "power .5"] [--seed 100]

The strong screen of `lab/premise.py`, its measures and its recipe `family`; one thing is changed at a time. Sets are
judged by 32 cells, whatever the size of a training set. A network whose table is in FOLDER is not trained again. Two
choices are no settings of the package and change its code for this study: *token* adds to each noised cell of a set a
learned linear map of √m times the mean of its cells, which is standard normal where sampling starts, so that the set
has noise of its own at full size; *pooled* adds the squared distance to the loss (the power 2, which asks for the
pooled distribution). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import premise
from torch import Tensor

from perturbdiff.diffusion import losses
from perturbdiff.model import Denoiser
from perturbdiff.model.layers import linear
from perturbdiff.training.training_stages import train

CELLS = 32
CHOICES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "as it is, other draws": ("seed=7",),
    "noise .02": ("train.set_noise=0.02",),
    "noise .05": ("train.set_noise=0.05",),
    "power .5": ("loss.set_power=0.5",),
    "power 1.5": ("loss.set_power=1.5",),
    "power 2": ("loss.set_power=2",),
    "48 cells": ("train.set_size=48", "train.sets_per_step=5"),
    "64 cells": ("train.set_size=64", "train.sets_per_step=4"),
    "gene noise": ("model.gene_noise=true",),
    "gene noise, other draws": ("model.gene_noise=true", "seed=7"),
    "token": (),
    "pooled": (),
}
AS_RECOMMENDED = ("sample.zeros=detected", "sample.totals=matched")
"""How the networks of `MATCHED` are sampled a second time."""
MATCHED = ("as it is", "gene noise")


@contextmanager
def token() -> Iterator[None]:
    """Give new networks the token, and read it in networks that have one."""
    make, embed = Denoiser.__init__, Denoiser.embed

    def with_layer(self: Denoiser, config: object, **sizes: object) -> None:
        make(self, config, **sizes)  # pyright: ignore[reportArgumentType]
        self.token = linear(self.num_genes, self.config.width)

    def with_token(self: Denoiser, x_t: Tensor, *others: Tensor | None) -> Tensor:
        mean = x_t.mean(dim=1, keepdim=True) * x_t.shape[1] ** 0.5
        return embed(self, x_t, *others) + self.token(mean)

    with patch.object(Denoiser, "__init__", with_layer), patch.object(Denoiser, "embed", with_token):
        yield


@contextmanager
def pooled() -> Iterator[None]:
    """Add the squared distance of sets to the distance in the loss of whole sets."""
    to_power = losses._to_power
    with patch.object(losses, "_to_power", lambda square, power: to_power(square, power) + square):
        yield


CHANGES = {"token": token, "pooled": pooled}


def studied(name: str, made: premise.Screen, options: argparse.Namespace) -> pd.DataFrame:
    """Return the measures of one choice, a line for each condition and way of sampling."""
    place = made.folder / f"{name.replace(' ', '-')}.csv"
    if place.is_file():
        return pd.read_csv(place)
    extra = argparse.Namespace(
        steps=options.steps, set=[f"seed={options.seed}", *CHOICES[name], *options.set]
    )
    config = premise.recipe("family", "strong", extra)
    real, training = (premise.true_sets(made, part, CELLS) for part in ("test", "train"))
    rows: list[dict[str, object]] = []
    with ExitStack() as changed:
        if name in CHANGES:
            changed.enter_context(CHANGES[name]())
        start = time.process_time()
        bundle = train(made.stores["sets"], made.splits["sets"], made.folder / f"{place.stem}", config)
        spent = time.process_time() - start
        for method, more in {
            name: (),
            **({f"{name}, matched": AS_RECOMMENDED} if name in MATCHED else {}),
        }.items():
            extra.set = [*extra.set, *more]
            own = premise.recipe("family", "strong", extra)
            sets = premise.sampled_sets(made, "sets", bundle, own, options.seed, CELLS)
            rows += [
                {"level": "strong", "seed": options.seed, "method": method, "seconds": spent, **row}
                for row in premise.measure(sets, real, training)
            ]
    table = pd.DataFrame(rows)
    table.to_csv(place, index=False, float_format="%.6g")
    print(f"{name}: {spent:.0f} CPU s", flush=True)
    return table


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--seed", type=int, default=100, help="of the screen")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--set", action="append", default=[], help="change all recipes")
    options = parser.parse_args()
    options.steps = dict.fromkeys(premise.MODELS, options.steps)
    folder = options.out / f"strong-{options.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    made = premise.screen(folder, premise.recipe("recommended", "strong", options), options.seed)
    table = pd.concat([studied(name, made, options) for name in options.choices])
    print("\n".join(premise.markdown(table)))


if __name__ == "__main__":
    main()
