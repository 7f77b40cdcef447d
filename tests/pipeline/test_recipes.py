"""The workflow resolves recipes itself, to know what a stage depends on: to the same values as the package."""

from perturbdiff.config import recipes
from perturbdiff.config.settings import Config

QUICK = "baseline.settings=quick;baseline.options.epochs=30;baseline.options.lr=0.01;baseline.options.loss=nb"


def test_presets_variants_and_sizes_are_the_packages(questions, tmp_path):
    (tmp_path / "mine.yaml").write_text("base: kang18\nvariant: paper\nsize: small\nmodel: {depth: 2}\n")
    cases = [[name, ""] for name in recipes.presets()]
    cases += [
        ["kang18", "model.leak=0.2; variant=released;size=large"],
        ["demo", QUICK],
        ["mine.yaml", "variant=recommended"],
    ]
    for name, text in cases:
        source = tmp_path / name if name.endswith(".yaml") else name
        overrides = [part.strip() for part in text.split(";") if part]
        tree = questions.recipe(tmp_path, name, text)
        assert Config.model_validate(tree) == recipes.load(source, overrides), name


def test_an_unknown_variant_is_told(questions, tmp_path):
    (tmp_path / "kang.h5ad").touch()
    (tmp_path / "sheet.csv").write_text(
        "id,dataset,input,preset,mode,overrides\na,kang,kang.h5ad,tiny,train,variant=releasedd\n"
    )
    told = questions.refusal(tmp_path, input=str(tmp_path / "sheet.csv"))
    assert "line 2 (a): unknown variant 'releasedd'; variants: paper, recommended, released" in told
