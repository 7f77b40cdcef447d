"""The workflow resolves recipes itself, to know what a stage depends on: to the same values as the package."""

import json
from pathlib import Path

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config

ROOT = Path(__file__).parents[2]
QUICK = "baseline.settings=quick;baseline.options.epochs=30;baseline.options.lr=0.01;baseline.options.loss=nb"
SCRIPT = """
include {{ expand; overlay; parseOverrides; readPreset }} from '{root}/modules/plan/recipes'

workflow {{
    def cases = new groovy.json.JsonSlurper().parseText(file('cases.json').text)
    def found = cases.collect {{ one -> overlay(readPreset(one[0], '.'), expand(parseOverrides(one[1]))) }}
    file('found.json').text = groovy.json.JsonOutput.toJson(found)
}}
"""


def test_presets_variants_and_sizes_are_the_packages(nextflow, tmp_path):
    (tmp_path / "script.nf").write_text(SCRIPT.format(root=ROOT))
    (tmp_path / "perturbdiff").symlink_to(ROOT / "perturbdiff")  # where a launched project has its presets
    (tmp_path / "mine.yaml").write_text("base: kang18\nvariant: paper\nsize: small\nmodel: {depth: 2}\n")
    cases = [[name, ""] for name in recipes.presets()]
    cases += [
        ["kang18", "model.leak=0.2; variant=released;size=large"],
        ["demo", QUICK],
        ["mine.yaml", "variant=recommended"],
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    ran = nextflow("run", "script.nf")
    assert ran.code == 0, ran.output
    found = json.loads((tmp_path / "found.json").read_text())
    for (name, text), tree in zip(cases, found, strict=True):
        source = tmp_path / name if name.endswith(".yaml") else name
        overrides = [part.strip() for part in text.split(";") if part]
        assert Config.model_validate(tree) == recipes.load(source, overrides), name


def test_an_unknown_variant_is_told(nextflow, tmp_path):
    (tmp_path / "kang.h5ad").touch()
    (tmp_path / "sheet.csv").write_text(
        "id,dataset,input,preset,mode,overrides\na,kang,kang.h5ad,tiny,train,variant=releasedd\n"
    )
    ran = nextflow.run("-stub", "--input", "sheet.csv")
    assert ran.code != 0
    assert "line 2 (a): unknown variant 'releasedd'; variants: paper, recommended, released" in ran.output
