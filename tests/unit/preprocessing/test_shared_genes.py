"""Merge-then-select: composites choose what scanpy chooses on their merged cells; folders, resumption, mistakes."""

import errno
import pickle

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from small_store import small_store
from tiny_data import tiny_counts

from perturbdiff.conditions.gene_names import kinds_of
from perturbdiff.config.settings import DataConfig
from perturbdiff.genes.gene_lists import read_names, short_paths
from perturbdiff.preprocessing import shared_genes
from perturbdiff.preprocessing import studies as composites
from perturbdiff.preprocessing import studies as study_sums
from perturbdiff.preprocessing.preprocessing_stage import Machine
from perturbdiff.preprocessing.shared_genes import build_vocabulary
from perturbdiff.runtime.errors import UserError

TOP = 60
CONFIG = DataConfig(num_hvgs=TOP)


def study(seed: int, cells: int, genes: list[str], scale: float = 1.0) -> ad.AnnData:
    """Counts of shared genes with per-gene parameters that depend on the gene's name alone."""
    rng = np.random.default_rng(seed)
    mean = np.array([np.random.default_rng(int(g[1:])).lognormal(-0.5, 1.2) for g in genes]) * scale
    spread = np.array([np.random.default_rng(int(g[1:]) + 5000).uniform(0.05, 3) for g in genes])
    latent = rng.gamma(1 / spread, spread, (cells, len(genes)))
    counts = rng.poisson(mean * latent).astype(np.float32)
    obs = pd.DataFrame(index=[f"s{seed}c{i}" for i in range(cells)])
    return ad.AnnData(sp.csr_matrix(counts), obs, pd.DataFrame(index=genes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five studies with different genes in different orders, as CSR, CSC and dense h5ad and as Zarr."""
    place = tmp_path_factory.mktemp("studies")
    rng = np.random.default_rng(0)
    every = [f"g{i}" for i in range(400)]
    for number, cells in enumerate((90, 70, 50, 40, 30)):
        genes = list(rng.choice(every, 400 - 40 * number, replace=False))
        made = study(number, cells, genes, scale=1 + number / 2)
        if number == 1:
            made.X = made.X.tocsc()
        if number == 2:
            made.X = made.X.toarray()
        if number == 3:
            made.write_zarr(place / f"study{number}.zarr")
        else:
            made.write_h5ad(place / f"study{number}.h5ad")
    return place


def files_of(folder):
    return sorted(folder.iterdir())


def read(path):
    return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def scanpy_choice(paths, top=TOP, flavor="seurat"):
    merged = ad.concat([read(p) for p in paths], join="outer", fill_value=0)
    merged.X = sp.csr_matrix(merged.X)
    if flavor != "seurat_v3":
        sc.pp.normalize_total(merged)
        sc.pp.log1p(merged)
    sc.pp.highly_variable_genes(merged, n_top_genes=top, flavor=flavor)
    return merged.var


def tree(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "run.json"}


@pytest.mark.parametrize("flavor", ["seurat", "cell_ranger", "seurat_v3"])
def test_composites_choose_what_scanpy_chooses(folder, tmp_path, flavor):
    config = CONFIG.model_copy(update={"hvg_flavor": flavor})
    out = build_vocabulary(files_of(folder), tmp_path / "v", config, composites=2)
    score = "variances_norm" if flavor == "seurat_v3" else "dispersions_norm"
    studies = pd.read_csv(out / "composites.csv")
    hvgs = pd.read_parquet(out / "hvgs.parquet")
    union = set()
    for name, own in studies.groupby("composite"):
        expected = scanpy_choice([folder / s for s in own["study"]], flavor=flavor)
        best = expected[expected["highly_variable"]].sort_values(score, ascending=False)
        found = hvgs[hvgs["composite"] == name]
        assert set(found["gene"]) == set(best.index)
        assert found["rank"].tolist() == list(range(1, len(found) + 1))
        scores = best[score].loc[found["gene"]]
        np.testing.assert_allclose(found["score"], scores, rtol=1e-4, atol=1e-5)
        union |= set(best.index)
    assert read_names(out) == sorted(union)


def test_one_composite_of_pieces_is_one_dataset(folder, tmp_path, monkeypatch):
    whole = build_vocabulary(files_of(folder), tmp_path / "whole", CONFIG, composites=1)
    monkeypatch.setattr(composites, "VALUES_PER_PIECE", 4000)
    cut = build_vocabulary(files_of(folder), tmp_path / "cut", CONFIG, composites=1)
    assert (
        read_names(cut)
        == read_names(whole)
        == sorted(scanpy_choice(files_of(folder)).query("highly_variable").index)
    )


@pytest.mark.parametrize("flavor", ["seurat", "cell_ranger"])
def test_intersection_leaves_out_what_one_study_lacks(folder, tmp_path, flavor):
    paths, config = files_of(folder)[:3], CONFIG.model_copy(update={"hvg_flavor": flavor})
    out = build_vocabulary(paths, tmp_path / "v", config, composites=1, join="intersection")
    merged = ad.concat([read(p) for p in paths], join="outer", fill_value=0)
    merged.X = sp.csr_matrix(merged.X)
    sc.pp.normalize_total(merged)  # depth over all genes of each study
    sc.pp.log1p(merged)
    common = set.intersection(*(set(read(p).var_names) for p in paths))
    merged = merged[:, sorted(common)].copy()
    sc.pp.highly_variable_genes(merged, n_top_genes=TOP, flavor=flavor)
    assert read_names(out) == sorted(merged.var_names[merged.var["highly_variable"]])
    coverage = pd.read_csv(out / "coverage.csv").set_index(["kind", "data"])
    assert coverage.loc[("composite", "composite-01"), "genes"] == len(common)


def test_balanced_by_cells_and_independent_of_order(folder, tmp_path):
    config = DataConfig()
    forward = composites.survey(files_of(folder), config, tmp_path)
    backward = composites.survey(files_of(folder)[::-1], config, tmp_path)
    assert [s.name for s in forward.studies] == [s.name for s in backward.studies]
    labels = composites.balanced(forward, 2)
    number = [int(label[-2:]) for label in labels]
    assert number == [1, 2, 2, 1, 2]  # 90 | 70, 50 to the lighter, then 40 to the other, then 30
    cells = pd.Series(forward.cells).groupby(labels).sum()
    assert cells.max() - cells.min() <= 30
    assert composites.balanced(backward, 2) == labels
    assert len(set(composites.balanced(forward, None))) == 5
    with pytest.raises(UserError, match="only 5 studies"):
        composites.balanced(forward, 6)


def test_ties_go_by_name():
    corpus = composites.Corpus(
        [composites.Study(n, None, 10, np.zeros(1, np.int32), 1, 1) for n in "abcd"], np.array(["g"], object)
    )
    assert composites.balanced(corpus, 2) == ["composite-01", "composite-02", "composite-01", "composite-02"]


def test_given_table(folder, tmp_path):
    table = tmp_path / "table.csv"
    names = [p.name for p in files_of(folder)]
    table.write_text(
        "study,composite\n" + "".join(f"{n},{'blood' if i < 3 else 'brain'}\n" for i, n in enumerate(names))
    )
    out = build_vocabulary(files_of(folder), tmp_path / "v", CONFIG, assign=table)
    studies = pd.read_csv(out / "composites.csv")
    assert studies.groupby("composite")["study"].apply(list).to_dict() == {
        "blood": names[:3],
        "brain": names[3:],
    }
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="no row for study 'study4.h5ad'"):
        build_vocabulary(files_of(folder), tmp_path / "w", CONFIG, assign=table)
    table.write_text("study;composite\na;b\n")
    with pytest.raises(UserError, match="columns study, composite"):
        build_vocabulary(files_of(folder), tmp_path / "w", CONFIG, assign=table)


def test_added_genes_and_coverage_by_hand(tmp_path):
    own = [{f"g{i}" for i in range(30)}, {f"g{i}" for i in range(20, 60)}]
    for number, genes in enumerate(own):
        study(number, 40, sorted(genes)).write_h5ad(tmp_path / f"s{number}.h5ad")
    (tmp_path / "added.txt").write_text("# chosen elsewhere\ng55\ng1\ng900\n")
    paths = [tmp_path / "s0.h5ad", tmp_path / "s1.h5ad"]
    added = {"add": [tmp_path / "added.txt"], "cover": paths[:1]}
    out = build_vocabulary(paths, tmp_path / "v", DataConfig(num_hvgs=5), composites=1, **added)
    chosen = set(pd.read_parquet(out / "hvgs.parquet")["gene"])
    genes = chosen | {"g1", "g55", "g900"}
    assert (out / "genes.txt").read_text().split() == sorted(genes)

    table = pd.read_parquet(out / "vocabulary.parquet").set_index("gene")
    assert table.loc["g900", ["n_composites", "n_studies", "origins"]].tolist() == [0, 0, "added.txt"]
    best = table["mean_rank"].idxmin()
    assert table.loc[best, ["n_composites", "mean_rank"]].tolist() == [1, 1]
    assert table.loc[best, "origins"].split(";")[0] == "composite-01"
    assert table["n_studies"].to_dict() == {g: sum(g in s for s in own) for g in genes}

    studies = pd.read_csv(out / "composites.csv").set_index("study")
    assert studies["chosen_by_composite"].tolist() == [len(chosen & s) for s in own]
    coverage = pd.read_csv(out / "coverage.csv").set_index(["kind", "data"])
    for name, has in zip(("s0.h5ad", "s1.h5ad"), own, strict=True):
        row = coverage.loc[("study", name)]
        assert row["genes"] == len(has)
        assert row["shared"] == len(has & genes)
        assert row["share_of_vocabulary"] == pytest.approx(len(has & genes) / len(genes), abs=1e-6)
        assert row["share_of_data"] == pytest.approx(len(has & genes) / len(has), abs=1e-6)
        assert row["shared_of_composites"] == len(has & chosen)
        assert row["share_of_composites"] == pytest.approx(len(has & chosen) / len(chosen), abs=1e-6)
    assert coverage.loc[("covered", "s0.h5ad")].tolist() == coverage.loc[("study", "s0.h5ad")].tolist()
    assert coverage.loc[("added", "added.txt"), ["genes", "shared", "share_of_data"]].tolist() == [3, 3, 1]
    assert coverage.loc[("study", "(mean)"), "shared"] == sum(len(s & genes) for s in own) / 2
    assert coverage.loc[("composite", "(mean)"), "genes"] == len(own[0] | own[1])


def test_a_store_is_added(tmp_path):
    made = small_store(tmp_path, ["data.num_hvgs=10"])
    counts = tiny_counts(seed=3)
    counts.write_h5ad(tmp_path / "other.h5ad")
    out = build_vocabulary(
        [tmp_path / "other.h5ad"], tmp_path / "v", DataConfig(num_hvgs=5), add=[made.store]
    )
    assert set(made.opened.genes) <= set(read_names(out))
    with pytest.raises(UserError, match="has all genes that were measured"):
        build_vocabulary([tmp_path / "other.h5ad"], tmp_path / "w", CONFIG, add=[made.counts])


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(folder, tmp_path, monkeypatch):
    undisturbed = build_vocabulary(files_of(folder), tmp_path / "a", CONFIG, composites=2)
    original, done = study_sums._first, []

    def failing(reader, config):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(reader.file.path.name)
        return original(reader, config)

    monkeypatch.setattr(study_sums, "_first", failing)
    with pytest.raises(KeyboardInterrupt):
        build_vocabulary(files_of(folder), tmp_path / "b", CONFIG, composites=2)
    assert not (tmp_path / "b").exists()
    again = []

    def counting(reader, config):
        again.append(reader.file.path.name)
        return original(reader, config)

    monkeypatch.setattr(study_sums, "_first", counting)
    resumed = build_vocabulary(files_of(folder), tmp_path / "b", CONFIG, composites=2)
    assert len(done) == 3
    assert not set(again) & set(done)
    assert tree(resumed) == tree(undisturbed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    again.clear()
    build_vocabulary(files_of(folder), tmp_path / "b", CONFIG, composites=2)
    assert again == []


def test_a_broken_study_does_not_cost_the_others(folder, tmp_path, monkeypatch):
    broken = study(9, 20, ["g1", "g2", "g3"])
    broken.X = broken.X * 0.5
    broken.write_h5ad(tmp_path / "zz.h5ad")
    paths = [*files_of(folder), tmp_path / "zz.h5ad"]
    with pytest.raises(UserError, match=r"zz\.h5ad.*counts"):
        build_vocabulary(paths, tmp_path / "v", CONFIG)
    read_again = []
    original = study_sums._first
    monkeypatch.setattr(
        study_sums, "_first", lambda r, c: read_again.append(r.file.path.name) or original(r, c)
    )
    broken.X = broken.X * 2
    broken.write_h5ad(tmp_path / "zz.h5ad")
    build_vocabulary(paths, tmp_path / "v", CONFIG)
    assert read_again == ["zz.h5ad"]


def test_a_study_changed_meanwhile(folder, tmp_path, monkeypatch):
    paths = [tmp_path / "a.h5ad", files_of(folder)[0]]
    study(3, 30, ["g1", "g2", "g3", "g4"]).write_h5ad(paths[0])
    original = study_sums._first

    def changing(reader, config):
        found = original(reader, config)
        paths[0].touch()
        return found

    monkeypatch.setattr(study_sums, "_first", changing)
    with pytest.raises(UserError, match=r"a\.h5ad: was changed"):
        build_vocabulary(paths, tmp_path / "v", CONFIG)
    assert not (tmp_path / "v").exists()


def test_a_full_disk_keeps_the_sums(folder, tmp_path, monkeypatch):
    done, original = [], study_sums.save

    def full(path, arrays):
        if len(done) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, arrays)
        done.append(path.name)

    monkeypatch.setattr(study_sums, "save", full)
    with pytest.raises(UserError, match=r"disk full .* goes on where it stopped .*\.v\.sums"):
        build_vocabulary(files_of(folder), tmp_path / "v", CONFIG)
    monkeypatch.setattr(
        study_sums, "save", lambda path, arrays: done.append(path.name) or original(path, arrays)
    )
    build_vocabulary(files_of(folder), tmp_path / "v", CONFIG)
    assert len(done) == len(set(done)) == 5


@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3"])
def test_the_order_in_which_tasks_end_changes_nothing(folder, tmp_path, monkeypatch, flavor):
    config = CONFIG.model_copy(update={"hvg_flavor": flavor})
    forward = build_vocabulary(files_of(folder), tmp_path / "forward", config, composites=2)

    def backward(self, function, tasks, **_):
        return [function(pickle.loads(pickle.dumps(task))) for task in reversed(tasks)][::-1]

    monkeypatch.setattr(shared_genes.TaskRunner, "run", backward)
    other = build_vocabulary(files_of(folder), tmp_path / "backward", config, composites=2)
    assert tree(forward) == tree(other)


@pytest.mark.slow
def test_same_bytes_from_worker_processes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_genes, "_STUDIES_PER_JOB", 2)
    one = build_vocabulary(files_of(folder), tmp_path / "one", CONFIG, composites=2)
    two = build_vocabulary(files_of(folder), tmp_path / "two", CONFIG, composites=2, machine=Machine(jobs=2))
    assert tree(one) == tree(two)


def test_list_of_studies(folder, tmp_path):
    listed = folder.parent / f"{tmp_path.name}.txt"
    listed.write_text("# all\n" + "".join(f"{folder.name}/{p.name}\n" for p in files_of(folder)))
    assert composites.study_paths([listed]) == files_of(folder)
    with pytest.raises(UserError, match="given twice"):
        composites.study_paths([listed, files_of(folder)[0]])
    with pytest.raises(UserError, match="no study given"):
        composites.study_paths([])


def test_names_that_do_not_match(folder, tmp_path):
    ids = [f"ENSG{i:011d}" for i in range(5)]
    for name, genes in {"ids": ids, "versions": [f"{g}.2" for g in ids], "alone": ["x1", "x2"]}.items():
        made = study(7, 20, [f"g{i}" for i in range(len(genes))])
        made.var_names = genes
        made.write_h5ad(tmp_path / f"{name}.h5ad")
    first = files_of(folder)[0]
    with pytest.raises(UserError, match=r"gene ids .*gene names .*data\.gene_key"):
        build_vocabulary([tmp_path / "ids.h5ad", first], tmp_path / "v", CONFIG)
    with pytest.raises(UserError, match="gene ids with a version"):
        build_vocabulary([tmp_path / "ids.h5ad", tmp_path / "versions.h5ad"], tmp_path / "v", CONFIG)
    with pytest.raises(UserError, match="shares no gene with any other study"):
        build_vocabulary([tmp_path / "alone.h5ad", first], tmp_path / "v", CONFIG)
    (tmp_path / "list.txt").write_text("\n".join(ids))
    with pytest.raises(UserError, match="none of its 5 genes is in a study"):
        build_vocabulary([first], tmp_path / "v", CONFIG, add=[tmp_path / "list.txt"])
    with pytest.raises(UserError, match="exclude each other"):
        build_vocabulary([first], tmp_path / "v", CONFIG, composites=1, assign=tmp_path / "list.txt")


def test_filters_and_depth(folder, tmp_path):
    data = read(files_of(folder)[0])
    least = int(np.median(np.asarray((data.X > 0).sum(axis=1))))
    config = DataConfig(num_hvgs=TOP, min_genes=least, target_sum=1000)
    out = build_vocabulary(files_of(folder)[:1], tmp_path / "v", config)
    sc.pp.filter_cells(data, min_genes=least)
    assert 0 < data.n_obs < 90
    sc.pp.normalize_total(data, target_sum=1000)
    sc.pp.log1p(data)
    sc.pp.highly_variable_genes(data, n_top_genes=TOP)
    assert read_names(out) == sorted(data.var_names[data.var["highly_variable"]])


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_median_of_a_merged_histogram(size):
    rng = np.random.default_rng(size)
    parts = [rng.integers(1, 9, size).astype(float) for _ in range(3)]
    counted = [np.unique(p, return_counts=True) for p in parts]
    values, cells = study_sums.add_histograms([c[0] for c in counted], [c[1] for c in counted])
    assert study_sums.median_of(values, cells) == np.median(np.concatenate(parts))


def test_short_names_are_unique(tmp_path):
    assert short_paths([tmp_path / "a" / "x.h5ad", tmp_path / "b" / "y.h5ad"]) == ["x.h5ad", "y.h5ad"]
    assert short_paths([tmp_path / "a" / "x.h5ad", tmp_path / "b" / "x.h5ad"]) == ["a/x.h5ad", "b/x.h5ad"]
    assert short_paths([]) == []


def test_kinds():
    names = ["ENSG00000000003", "ENSMUSG00000000003.4", "TP53", "AC012345.1", "FBgn0000003"]
    assert kinds_of(names).tolist() == [1, 2, 0, 0, 1]


def test_vocabulary_module_lists_its_settings():
    assert set(shared_genes.SETTINGS) <= set(DataConfig.model_fields)
    assert set(study_sums._SETTINGS) <= set(shared_genes.SETTINGS)
