"""Data against a recipe before hours are spent: each mistake that stops a later stage has its early message."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from small_store import small_store

from perturbdiff.config import recipes
from perturbdiff.inspection import costs, inspect_study, studies_of_sheet, study_of
from perturbdiff.inspection.costs import Hours
from perturbdiff.inspection.counted_cells import LookedAt
from perturbdiff.splits.split_rules import read_toml

SPLITS = Path(__file__).parents[3] / "assets" / "splits"
GENES = [f"GENE{k}" for k in range(12)]
LINES = ("hepg2", "jurkat")
BLANK = "[('Erdafitinib ', 0.05, 'uM')]"


@pytest.fixture(autouse=True)
def _no_network_of_the_paper(monkeypatch):
    monkeypatch.setattr(costs, "on_gpu", lambda *_: Hours(1.0, 0.5, 10))


@pytest.fixture
def write(tmp_path):
    """Write a small screen of two lines with its labels in the columns of a recipe; returns the path."""

    def make(
        name="screen.h5ad", genes=GENES, labels=("A", "B", "C"), control="non-targeting", log=False, **columns
    ):
        names = ("gene", "cell_line", "gem_group")
        rows = [(label, line, f"g{k}") for line in LINES for label in (control, *labels) for k in (1, 2)]
        obs = pd.DataFrame(rows, columns=names, index=[f"cell{k}" for k in range(len(rows))])
        counts = np.random.default_rng(0).poisson(1.0, (len(rows), len(genes))).astype(np.float32)
        counts[:, 0] += 1
        values = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4) if log else counts
        obs = obs.rename(columns=columns)
        cells = ad.AnnData(sparse.csr_matrix(values), obs, pd.DataFrame(index=list(genes)))
        if log:
            cells.layers["counts"] = sparse.csr_matrix(counts)
        cells.write_h5ad(tmp_path / name)
        return tmp_path / name

    return make


def look(*paths, preset="paper-replogle", overrides=("data.input_scale=counts",), **files):
    return inspect_study(study_of([str(path) for path in paths], preset, list(overrides), **files))


def texts(found, kind):
    return " / ".join(one.text for one in found.found if one.kind == kind)


def toml(path, *, test, valid=(), line="hepg2", control=()):
    path.write_text(
        'context_column = "cell_type"\n[datasets]\nscreen = ""\n[training]\nscreen = "train"\n'
        f'[fewshot."screen.{line}"]\nval = {[*valid]!r}\ntest = {[*test, *control]!r}\n'.replace(
            "'[(", '"[('
        ).replace(")]'", ')]"')
    )
    return path


def test_a_sound_screen_has_no_problem_and_tells_its_costs(write, tmp_path):
    found = look(write(), toml=toml(tmp_path / "s.toml", test=["A"], valid=["B"]))
    assert not found.problems
    facts = texts(found, "fact")
    assert "16 cells, 12 genes, counts up to" in facts
    assert "control cells 4, training cells 8, validation cells 2, test cells 2, perturbations 3" in facts
    assert "of memory a process" in facts
    assert "training 10 steps 60 min, predicting 2 cells 30 min" in facts
    assert (
        "methods of others hold up to 0.000384 MB of memory, if densely" in facts
    )  # 8 cells, 12 genes, float32


def test_every_held_out_condition_without_cells_is_named_at_once(write, tmp_path):
    path = write(labels=("A", "B", BLANK))
    wanted = toml(tmp_path / "s.toml", test=["A", "BB", "lost", BLANK.replace(" ',", "',")], valid=["gone"])
    (problem,) = look(path, toml=wanted).problems
    assert "4 of 5 held-out perturbations have no cells" in problem
    for name in ("'BB' (did you mean 'B')", "'lost'", "'gone'", f"(did you mean '{BLANK}')"):
        assert name in problem


def test_labels_that_the_split_may_leave_out_are_warnings(write, tmp_path):
    wanted = toml(tmp_path / "s.toml", test=["A", "lost"])
    found = look(write(), toml=wanted, overrides=("data.input_scale=counts", "split.missing=warn"))
    assert not found.problems
    assert "'lost'" in texts(found, "warning")
    assert "test cells 2" in texts(found, "fact")


def test_contexts_and_the_control_are_checked_too(write, tmp_path):
    path = write()
    problems = " / ".join(look(path, toml=toml(tmp_path / "s.toml", test=["A"], line="g1")).problems)
    assert "no cells of context 'g1' (it is a value of another column: set split.context_column)" in problems
    found = look(path, toml=toml(tmp_path / "s.toml", test=["A"], control=["non-targeting"]))
    assert "'non-targeting' is the control, which is never held out" in found.problems[0]
    rule = ("data.input_scale=counts", "split.held_out=[hepg3,rpe1]", "split.perturbations=[A,Z]")
    problems = " / ".join(look(path, overrides=rule).problems)
    for name in (
        "'hepg3' in 'cell_type', did you mean 'hepg2'?",
        "no cells of context 'rpe1'",
        "1 of 2 held-out perturbations",
    ):
        assert name in problems


def test_columns_labels_and_genes_are_told_of_together(write, tmp_path):
    path = write(genes=["TSPAN6", *GENES[1:], "TSPAN6"], gene="gen", gem_group="gemgroup")
    changes = ("data.input_scale=counts", "data.set_key=well", "data.extra_obs=[dish]")
    problems = " / ".join(look(path, overrides=changes, toml=toml(tmp_path / "s.toml", test=["A"])).problems)
    assert "gene names are not unique (TSPAN6)" in problems
    assert "no obs column 'well' (data.set_key); columns: " in problems
    assert "no obs column 'dish' (data.extra_obs); columns: " in problems
    assert "no obs column 'gene' (--pert-col or data.perturbation_key), did you mean 'gen'?" in problems
    assert "no obs column 'gem_group' (--batch-col" in problems


def test_doubled_genes_do_not_hide_the_labels(write, tmp_path):
    path = write(genes=["TSPAN6", *GENES[1:], "TSPAN6"])
    problems = " / ".join(look(path, toml=toml(tmp_path / "s.toml", test=["A", "lost"])).problems)
    assert "gene names are not unique (TSPAN6)" in problems
    assert "held-out perturbations have no cells: 'lost'" in problems


def test_cells_without_a_label_and_another_control_are_told(write):
    path = write(control="non-targeting ")
    cells = ad.read_h5ad(path)
    cells.obs["gem_group"] = cells.obs["gem_group"].astype(object).where(np.arange(16) > 2)
    cells.write_h5ad(path)
    problems = " / ".join(look(path, overrides=("data.input_scale=counts", "split.held_out=[]")).problems)
    assert "obs column 'gem_group' has 3 missing values; give these cells a label" in problems
    assert "no control cells: 'non-targeting' (data.control)" in problems
    assert "did you mean 'non-targeting '?" in problems


def test_values_of_another_scale_are_found_with_the_remedy(write):
    logs = write(log=True)
    (problem,) = look(logs).problems
    assert "X holds log1p" in problem
    assert "set data.layer=counts, which holds counts or data.input_scale=log1p" in problem
    assert not look(logs, overrides=()).problems
    (problem,) = look(write(), overrides=()).problems
    assert "X holds counts" in problem
    assert "set data.input_scale=counts" in problem


def test_genes_that_a_prior_lacks_are_known_before_it_is_finetuned(write, tmp_path):
    path, prior, kept = write(), tmp_path / "prior.txt", tmp_path / "kept.txt"
    prior.write_text("\n".join([*GENES[:6], "OTHER"]))
    kept.write_text("\n".join(GENES[4:8]))
    found = look(path, prior=prior, genes=kept)
    assert "2 of the 4 genes to keep are not in the prior's list" in found.problems[0]
    assert "evaluate would refuse the predictions after the training" in found.problems[0]
    found = look(path, prior=prior)
    assert not found.problems
    assert "6 of the 12 genes of the data are not in the prior's list" in texts(found, "warning")
    assert "6 of the 7 genes of prior.txt (85.7%)" in texts(found, "fact")
    prior.write_text("\n".join(f"ENSG{k:011d}" for k in range(5)))
    assert "no gene of" in look(path, prior=prior).problems[0]


def test_counts_are_compared_with_the_papers_table(write, tmp_path):
    warning = texts(look(write()), "warning")
    assert "4 control cells instead of 39,165 (-100.0%)" in warning
    assert "3 perturbations instead of 2,023" in warning
    recipe = tmp_path / "recipe.yaml"  # as the workflow writes it: named after the data set
    recipe.write_text("base: paper-replogle\nname: replogle\ndata: {input_scale: counts}\n")
    assert texts(look(write(), preset=str(recipe)), "warning") == warning


def test_a_full_disk_is_told_before(write, monkeypatch):
    monkeypatch.setattr(costs, "_STORE", 1e18)
    assert "the disk of the working folder has" in texts(look(write()), "warning")


def test_lost_and_broken_files_do_not_hide_the_others(write, tmp_path):
    (tmp_path / "broken.h5ad").write_bytes(b"no HDF5")
    found = look(write(), tmp_path / "lost.h5ad", tmp_path / "broken.h5ad")
    assert "1 of 3 files are not there: " in found.problems[0]
    assert "is not an h5ad file" in found.problems[1]
    assert "16 cells" in texts(found, "fact")


def test_files_that_share_no_gene_are_found(write):
    problems = look(write(), write("other.h5ad", genes=[f"ENSG{k:011d}" for k in range(12)])).problems
    assert any("no gene in common" in problem for problem in problems)


def test_matrices_are_not_read(write, monkeypatch):
    monkeypatch.setattr(LookedAt, "blocks", None)
    assert not look(write()).problems


def test_doses_are_joined_and_texts_among_them_found(write):
    path = write()
    cells = ad.read_h5ad(path)
    cells.obs["dose"] = ["0.5", "1"] * 8
    cells.write_h5ad(path)
    changes = ("data.input_scale=counts", "data.dose_key=dose", "split.perturbations=[A@0.5]")
    assert not look(path, overrides=changes).problems
    cells.obs["dose"] = ["0.5", "high"] * 8
    cells.write_h5ad(path)
    assert "holds what is no number: high" in look(path, overrides=changes).problems[0]


def test_a_store_is_compared_too(tmp_path):
    made = small_store(tmp_path)
    prior = tmp_path / "prior.txt"
    prior.write_text("OTHER\ng1\n")
    found = inspect_study(study_of([str(made.store)], "tiny", prior=prior))
    assert "a store of" in texts(found, "fact")
    assert "genes to keep are not in the prior's list" in found.problems[0]


def test_a_sheet_is_checked_row_by_row_and_each_data_set_once(write, tmp_path):
    path = write()
    (tmp_path / "list.txt").write_text("GENE1\n")
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(
        "id,dataset,input,preset,mode,init,transfer,overrides,split,genes,seed,arm\n"
        f"prior,cx|screen,{path}|{path},paper-pretrain,pretrain,,,"
        "cx:data.batch_key=none;screen:data.perturbation_key=gene;data.min_genes=3,,list.txt,0,\n"
        "a,screen,screen.h5ad,paper-replogle,train,,,,,,0,\n"
        "b,screen,screen.h5ad,paper-replogle,finetune,prior,keep,,,,0,\n"
        "c,screen,screen.h5ad,paper-replogle,finetune,prior,new-genes,train.max_steps=3,,,0,\n"
        "d,made,simulate:,demo,train,,,,,,0,\n"
        "e,screen,screen.h5ad,paper-replogle,finetune,bundle,keep,,,words,0,\n"
        "words,screen,lost.h5ad,,vocabulary,,,,,,0,\n"
        "f,screen,screen.h5ad,,sample,c,,sample.num_steps=2,,,0,\n"  # the data of c, which is there
    )
    cx, screen, plain, finetuned, continued = studies_of_sheet(str(sheet))
    assert (cx.name, cx.config.data.batch_key, cx.config.data.perturbation_key) == (
        "cx",
        None,
        "perturbation",
    )
    assert (screen.config.data.perturbation_key, screen.config.data.min_genes) == ("gene", 3)
    assert plain.files == (path,)
    assert plain.prior is None
    assert finetuned.prior == tmp_path / "list.txt"
    assert (str(continued.prior), continued.genes) == ("bundle", None), (
        "a list that a row makes is not there yet"
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Write a tiny file with the columns of a published one and all labels that its split names; returns the path."""

    def make(name, columns, control, contexts, blanks=True):
        spec = read_toml(SPLITS / f"{name}.toml", [name])
        rows = []
        for context in [*spec.contexts(), *contexts]:
            held = [label for labels in spec.fewshot.get(context, {}).values() for label in labels]
            rows += [(label, context) for label in [control, "other", *held]]
        labels = [(label if blanks else label.replace(" ',", "',"), context) for label, context in rows]
        obs = pd.DataFrame(labels, columns=columns[:2]).assign(**{columns[2]: "b1"})
        obs.index = [f"cell{k}" for k in range(len(obs))]
        values = np.ones((len(obs), 5), np.float32)
        values = (
            np.log1p(values / 3) if name == "replogle" else sparse.csr_matrix(values)
        )  # that file is dense
        path = tmp_path_factory.mktemp(name) / f"{name}.h5ad"
        ad.AnnData(values, obs.astype("category"), pd.DataFrame(index=GENES[:5])).write_h5ad(path)
        return path

    return make


@pytest.mark.parametrize(
    ("name", "columns", "control", "contexts"),
    [
        ("pbmc", ["cytokine", "donor", "cell_type"], "PBS", ["Donor2"]),
        ("tahoe100m", ["drugname_drugconc", "cell_line", "plate"], "[('DMSO_TF', 0.0, 'uM')]", ["CVCL_0023"]),
        ("replogle", ["gene", "cell_line", "gem_group"], "non-targeting", ["k562"]),
    ],
)
def test_the_papers_lists_fit_files_of_the_published_form(published, name, columns, control, contexts):
    path = published(name, columns, control, contexts)
    found = look(path, preset=f"paper-{name}", overrides=(), toml=SPLITS / f"{name}.toml")
    assert not found.problems
    assert "the paper's table counts otherwise" in texts(found, "warning")


def test_labels_without_their_blanks_are_found_in_every_line(published):
    columns, control = ["drugname_drugconc", "cell_line", "plate"], "[('DMSO_TF', 0.0, 'uM')]"
    path = published("tahoe100m", columns, control, [], blanks=False)
    problems = look(path, preset="paper-tahoe100m", overrides=(), toml=SPLITS / "tahoe100m.toml").problems
    assert len(problems) == 5, "one for each held-out line"
    said = "'[('Erdafitinib ', 0.05, 'uM')]' (did you mean '[('Erdafitinib', 0.05, 'uM')]')"
    assert all(said in text for text in problems)


@pytest.mark.parametrize("name", ["main", "main-replogle", "zeroshot", "fewshot", "variants", "guidance"])
def test_the_papers_sheets_can_be_read(name):
    assert {study.name for study in studies_of_sheet(name)} <= {"cellxgene", "pbmc", "tahoe100m", "replogle"}


def test_the_command_names_all_problems_with_exit_code_2(write, run_cli):
    path = write(gene="gen", cell_line="line")
    outcome = run_cli("data", "check", path, "--config", "paper-replogle")
    assert outcome.code == 2
    assert "error: 3 problems found" in outcome.err
    assert "  3. screen.h5ad: " in outcome.err
    assert "problem  " in outcome.out
    sound = run_cli("data", "check", path, *("--set", "data.perturbation_key=gen"), *("--set", "data.control=A"),
                    *("--set", "data.cell_type_key=line"), *("--set", "data.batch_key=none"))  # fmt: skip
    assert sound.code == 0
    assert run_cli("data", "check").code == 2
    refused = run_cli("data", "get", "pbmc", "--out", path.parent / "new")
    assert refused.code == 2
    assert "add --yes to fetch it to" in refused.err
    assert not (path.parent / "new").exists()
    assert "did you mean 'main'?" in run_cli("data", "check", "--experiment", "maiin").err


def test_hours_follow_from_the_recipe(monkeypatch):
    monkeypatch.undo()
    config = recipes.load("tiny", ["train.max_steps=100", "train.max_epochs=null"])
    one = costs.on_gpu(config, 50, (3, 2, 2), 1000, 100)
    more = costs.on_gpu(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 200})}),
                        50, (3, 2, 2), 1000, 300)  # fmt: skip
    assert more.training == pytest.approx(2 * one.training)
    assert more.sampling == pytest.approx(3 * one.sampling)


def test_the_costs_of_the_papers_blood_cells_are_those_of_docs_scale():
    size = costs.preprocessing(212e9, 9_697_974, 1942, 40_352, 2000)
    assert size.store == pytest.approx(2 * 1.38e9, rel=0.1), "up to twice the share of all genes"
    assert size.labels == pytest.approx(148 * 2**20, rel=0.01)
    assert size.reading == pytest.approx(636)
