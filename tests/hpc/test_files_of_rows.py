"""Files that rows name, from folders outside the work folder: they reach the tasks in the image, on the nodes."""

from pathlib import Path

import pandas as pd
import pytest
from hpc.test_dask import plate
from hpc.test_pipeline import PATIENCE, check_every_task_was_a_job_in_the_image
from public_schemas import GENES, tahoe_parquet, tahoe_plate
from tiny_encoder import write_esm

HEADER = "id,dataset,input,preset,mode,overrides,embeddings,options"
PROTEINS = {"A": "MSTESMIRDVELAEEALPKKTGG", "B": "MNSFST", "C": "MKYTSYILAFQL"}
SPLIT = "split.context_column=batch;split.num_held_out=1;split.train_fraction=0.3"
RECIPE = """\
base: tiny
data: {perturbation_key: drugname_drugconc, control: "[('DMSO_TF', 0.0, 'uM')]", cell_type_key: plate,
       batch_key: cell_line_id}
split: {context_column: batch, num_held_out: 1, train_fraction: 0.3}
"""


@pytest.fixture
def elsewhere(workflow):
    """A folder of the user's with counts, names of genes, an encoder, and Tahoe-100M's Parquet files."""
    folder = workflow.folder / "my files"
    folder.mkdir()
    for seed in (0, 1, 2):
        plate(folder / f"plate{seed}.h5ad", seed)
    (folder / "old names.csv").write_text("alias,symbol\nGENE0,TP53\n")
    (folder / "proteins.csv").write_text(
        "name,sequence\n" + "".join(f"{name},{text}\n" for name, text in PROTEINS.items())
    )
    write_esm(folder / "encoder")
    plates = [tahoe_plate(folder / f"tahoe{k}.h5ad", plate=k, cells=6, labels=3, every=False) for k in (1, 2)]
    tahoe_parquet(folder / "hub", plates)
    workflow.bed.account.give(folder)
    return folder


@pytest.mark.slow
def test_vectors_names_of_genes_and_folders_come_along(workflow, elsewhere):
    renamed = f"data.gene_aliases={elsewhere}/old names.csv;data.num_hvgs=null;{SPLIT}"
    cells = ";".join(f"{elsewhere}/plate{seed}.h5ad" for seed in (0, 1, 2))
    rows = [
        f"vectors,,{elsewhere}/proteins.csv,,embed,,,model={elsewhere}/encoder;local-only",
        f"model,screen,{cells},tiny,train,{renamed},perturbation=vectors,",
        f"tahoe,lines,{elsewhere}/hub,{workflow.write('tahoe.yaml', RECIPE)},control,,,",
    ]
    sheet = workflow.write("sheet.csv", "\n".join([HEADER, *rows]) + "\n")
    given = ("--input", sheet, "--baselines", "none", "--ceiling", "false")
    ran = workflow.run(*given, timeout=PATIENCE)
    assert ran.code == 0, ran.output
    check_every_task_was_a_job_in_the_image(ran, workflow.bed)
    table = pd.read_parquet(ran.outdir / "embeddings" / "vectors.parquet")
    assert len(table) == len(PROTEINS)
    assert (ran.outdir / "models" / "model" / "embeddings" / "perturbation.npz").is_file()
    genes = {
        path.parent.name.split("-")[0]: _genes(path.parent)
        for path in ran.outdir.glob("stores/*/manifest.json")
    }
    assert "TP53" in genes["screen"]
    assert "GENE0" not in genes["screen"]
    assert len(genes["lines"]) == GENES
    assert all(name in (ran.outdir / "report.txt").read_text() for name in ("model", "tahoe"))


def _genes(store: Path) -> list[str]:
    from perturbdiff.store import Store

    return list(Store(store).genes)
