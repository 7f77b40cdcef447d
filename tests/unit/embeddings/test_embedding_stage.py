"""Semantic tables from encoders: hand computations on tiny random models, inputs, failures."""

import json
import logging

import numpy as np
import pytest
from tiny_encoder import write_esm

from perturbdiff.embeddings import embed
from perturbdiff.embeddings.embedding_stage import PRESETS, locate
from perturbdiff.embeddings.embedding_tables import EmbeddingTable
from perturbdiff.embeddings.named_texts import read_named_texts
from perturbdiff.runtime.errors import UserError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the extra 'embed' is not installed")

SEQUENCES = {"TNF": "MSTESMIRDVELAEEALPKKTGG", "IL6": "MNSFST", "IFNG": "MKYTSYILAFQL", "one": "M"}
SMILES = {"ethanol": "CCO", "benzene": "c1ccccc1", "aspirin": "CC(=O)Oc1ccccc1C(=O)O"}
TEXTS = {"T cell": "a cell that kills", "B cell": "a cell", "NK cell": "cell that kills a tumour cell"}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test may reach for the network or a person's own cache."""
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def saved(folder, tokenizer, model):
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def esm(tmp_path_factory):
    """A masked-LM checkpoint with the files of the published ones: vocab.txt and no pooler."""
    return write_esm(tmp_path_factory.mktemp("esm") / "tiny-esm")


def word_pieces(words):
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A text encoder that knows the words of `TEXTS` and the signs of `SMILES`."""
    folder = tmp_path_factory.mktemp("bert") / "tiny-bert"
    words = sorted({word for text in TEXTS.values() for word in text.split()})
    signs = sorted({sign for text in SMILES.values() for sign in text})
    vocabulary = word_pieces([*words, *signs, *(f"##{sign}" for sign in signs)])
    vocabulary = list(dict.fromkeys(vocabulary))
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    return saved(folder, tokenizer, transformers.BertModel(config))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """A masked-LM checkpoint with byte pairs, as the models of SMILES are; its positions begin after the padding's."""
    folder = tmp_path_factory.mktemp("roberta") / "tiny-roberta"
    folder.mkdir()
    signs = sorted({sign for text in SMILES.values() for sign in text})
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *signs, "CC"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\nC C\n")
    torch.manual_seed(2)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary), max_position_embeddings=26, pad_token_id=1, **shape
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    return folder


def by_hand(folder, text, layer=-1):
    """Hidden states [tokens, e] of one text alone, begin and end included."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
    return out.hidden_states[layer][0].numpy()


def csv_of(path, entries, column):
    path.write_text(f"name,{column}\n" + "".join(f"{name},{text}\n" for name, text in entries.items()))
    return path


def fasta_of(path, entries):
    lines = (f">{name} some words\n{text[:5]}\n{text[5:]}\n" for name, text in entries.items())
    path.write_text("".join(lines))
    return path


def test_sequences_are_means_over_residues(tmp_path, esm):
    source, out = fasta_of(tmp_path / "in.fasta", SEQUENCES), tmp_path / "out.parquet"
    assert embed(source, out, model=str(esm), batch_size=3, device="cpu") == out
    table = EmbeddingTable.read(out)
    assert table.names == tuple(SEQUENCES)
    for name, vector in zip(table.names, table.vectors, strict=True):
        states = by_hand(esm, SEQUENCES[name])
        assert len(states) == len(SEQUENCES[name]) + 2
        np.testing.assert_allclose(vector, states[1:-1].mean(0), atol=1e-6)


def test_smiles_are_the_first_state(tmp_path, bert):
    source, out = csv_of(tmp_path / "in.csv", SMILES, "smiles"), tmp_path / "out.npz"
    embed(source, out, model=str(bert), device="cpu")
    table = EmbeddingTable.read(out)
    for name, vector in zip(table.names, table.vectors, strict=True):
        np.testing.assert_allclose(vector, by_hand(bert, SMILES[name])[0], atol=1e-6)


def test_byte_pairs_and_positions_after_the_padding(tmp_path, roberta):
    entries = SMILES | {"long": "O" * 40}
    out = tmp_path / "out.npz"
    embed(csv_of(tmp_path / "in.csv", entries, "smiles"), out, model=str(roberta), pool="mean", device="cpu")
    assert json.loads((tmp_path / "out.npz.manifest.json").read_text())["results"]["max_length"] == 24
    for name, vector in zip(entries, EmbeddingTable.read(out).vectors, strict=True):
        hand = by_hand(roberta, entries[name][:22])[1:-1].mean(0)
        np.testing.assert_allclose(vector, hand, atol=1e-6)


@pytest.mark.parametrize(
    ("pool", "layer", "hand"),
    [(None, -1, lambda s: s.mean(0)), ("last", -1, lambda s: s[-1]), ("cls", 1, lambda s: s[0])],
)
def test_texts_are_means_over_all_tokens_or_as_asked(tmp_path, bert, pool, layer, hand):
    source, out = csv_of(tmp_path / "in.csv", TEXTS, "text"), tmp_path / "out.parquet"
    embed(source, out, model=str(bert), pool=pool, layer=layer, device="cpu")
    table = EmbeddingTable.read(out)
    for name, vector in zip(table.names, table.vectors, strict=True):
        np.testing.assert_allclose(vector, hand(by_hand(bert, TEXTS[name], layer)), atol=1e-6)


def test_batch_size_and_order_do_not_matter(tmp_path, esm):
    source = fasta_of(tmp_path / "in.fa", SEQUENCES)
    backwards = fasta_of(tmp_path / "back.fa", dict(reversed(SEQUENCES.items())))
    tables = []
    for number, (given, size) in enumerate([(source, 1), (source, 2), (source, 64), (backwards, 3)]):
        out = embed(given, tmp_path / f"{number}.npz", model=str(esm), batch_size=size, device="cpu")
        tables.append(EmbeddingTable.read(out))
    rows = [tables[3].row(name) for name in tables[0].names]
    np.testing.assert_allclose(tables[1].vectors, tables[0].vectors, atol=1e-6)
    np.testing.assert_allclose(tables[2].vectors, tables[0].vectors, atol=1e-6)
    np.testing.assert_allclose(tables[3].vectors[rows], tables[0].vectors, atol=1e-6)


def test_long_inputs_are_cut_and_told(tmp_path, esm, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)
    long = {"short": "MKL", "long": "MKLV" * 20}
    source = fasta_of(tmp_path / "in.fasta", long)
    out = embed(source, tmp_path / "a.npz", model=str(esm), device="cpu")
    assert "1 of 2 are longer than 32 tokens" in caplog.text
    np.testing.assert_allclose(
        EmbeddingTable.read(out).vectors[1], by_hand(esm, ("MKLV" * 20)[:30])[1:-1].mean(0), atol=1e-6
    )
    results = json.loads((tmp_path / "a.npz.manifest.json").read_text())["results"]
    assert (results["cut"], results["max_length"], results["unknown"]) == (1, 32, 0)
    whole = embed(source, tmp_path / "b.npz", model=str(esm), max_length=82, device="cpu")
    np.testing.assert_allclose(
        EmbeddingTable.read(whole).vectors[1], by_hand(esm, "MKLV" * 20)[1:-1].mean(0), atol=1e-6
    )


def test_learned_positions_are_a_limit(tmp_path, bert):
    source = csv_of(tmp_path / "in.csv", TEXTS, "text")
    with pytest.raises(UserError, match="positions for 24 tokens"):
        embed(source, tmp_path / "out.npz", model=str(bert), max_length=25, device="cpu")
    assert not (tmp_path / "out.npz").exists()


def test_unknown_signs_are_told(tmp_path, bert, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("perturbdiff"), "propagate", True)
    source = csv_of(tmp_path / "in.csv", TEXTS | {"odd": "zebra cell"}, "text")
    embed(source, tmp_path / "out.npz", model=str(bert), device="cpu")
    assert "1 of 4 hold signs or words that the model does not know: odd" in caplog.text


def test_manifest_names_model_and_an_equal_run_has_nothing_to_do(tmp_path, bert):
    source, out = csv_of(tmp_path / "in.csv", TEXTS, "text"), tmp_path / "out.parquet"
    embed(source, out, model=str(bert), device="cpu")
    manifest = json.loads((tmp_path / "out.parquet.manifest.json").read_text())
    assert manifest["config"]["model"]["name"] == "tiny-bert"
    assert manifest["inputs"]["input"]["sha256"]
    written = out.stat().st_mtime_ns
    embed(source, out, model=str(bert), batch_size=1, device="cpu")
    assert out.stat().st_mtime_ns == written
    embed(source, out, model=str(bert), pool="cls", device="cpu")
    assert out.stat().st_mtime_ns != written
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_cached_model_is_known_by_its_commit(tmp_path, bert):
    entry = tmp_path / "cache" / "models--lab--tiny"
    (entry / "refs").mkdir(parents=True)
    (entry / "snapshots").mkdir()
    (entry / "refs" / "main").write_text("abc123")
    (entry / "snapshots" / "abc123").symlink_to(bert)
    located = locate("lab/tiny")
    assert (located.name, located.commit) == ("lab/tiny", "abc123")
    assert located.identity()["sha256"] == locate(str(bert)).identity()["sha256"]


@pytest.mark.parametrize("local_only", [True, False])
def test_no_network_says_what_to_do(tmp_path, run_cli, local_only):
    source = csv_of(tmp_path / "in.csv", SMILES, "smiles")
    flag = ["--local-only"] if local_only else []
    done = run_cli("--quiet", "embed", source, "--out", tmp_path / "o.parquet", "--model", "chemberta", *flag)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "hf download seyonec/ChemBERTa-zinc-base-v1 --revision refs/pr/2 --local-dir" in done.err
    assert not (tmp_path / "o.parquet").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [("esm2-650", "did you mean 'esm2-650m'"), ("./nowhere", "no such folder"), ("a/b/c", "no such folder")],
)
def test_names_that_are_no_model(model, said):
    with pytest.raises(UserError, match=said):
        locate(model)


def test_presets_are_names_of_the_hub():
    assert all(preset.name.count("/") == 1 for preset in PRESETS.values())


def test_folders_that_are_no_encoder(tmp_path, bert, esm):
    source = csv_of(tmp_path / "in.csv", SMILES, "smiles")
    empty, pickled, wrong, damaged = (tmp_path / n for n in ("empty", "pickled", "wrong", "damaged"))
    for folder in (empty, pickled, wrong, damaged):
        folder.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "config.json"):
        for folder in (wrong, damaged):
            (folder / name).write_bytes((bert / name).read_bytes() if (bert / name).exists() else b"")
    (wrong / "model.safetensors").write_bytes((esm / "model.safetensors").read_bytes())
    (damaged / "model.safetensors").write_bytes(b"\1\2\3")
    for folder, said in (
        (empty, "no config.json"),
        (pickled, "pickled weights are not read"),
        (wrong, "weights are missing"),
        (damaged, "cannot load it"),
        (esm, "reads protein sequences"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            embed(source, tmp_path / "out.npz", model=str(folder), device="cpu")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.npz").exists()


def test_code_of_a_model_is_not_run(tmp_path, bert):
    folder = tmp_path / "with-code"
    folder.mkdir()
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "novel", "auto_map": {"AutoConfig": "novel.Config", "AutoModel": "novel.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "novel.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot load it"):
        embed(csv_of(tmp_path / "in.csv", TEXTS, "text"), tmp_path / "o.npz", model=str(folder), device="cpu")
    assert not (tmp_path / "ran").exists()


def test_transformers_missing(tmp_path, monkeypatch, bert):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'perturbdiff\[embed\]'"):
        embed(csv_of(tmp_path / "in.csv", TEXTS, "text"), tmp_path / "out.npz", model=str(bert))


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("a.fasta", "MKL\n>x\nMKL\n", None, "line 1: a sequence before the first"),
        ("a.fasta", ">x\nMKL\n>\nMKL\n", None, "line 3: a header without a name"),
        ("a.fasta", ">x y\nMKL\n>x z\nMKV\n", None, "names occur twice: x"),
        ("a.fasta", ">x\n>y\nMK\n", None, "without sequence: x"),
        ("a.fasta", ">x\nMK-L1\n", None, "sequence of 'x' holds '-', '1'"),
        ("a.fasta", "", None, "holds no entries"),
        ("a.fasta", ">x\nMKL\n", "smiles", "FASTA holds sequences"),
        ("a.csv", "name,smiles\nx,CC,C\n", None, "line 2 has 3 columns, the first 2"),
        ("a.csv", "name,smiles\nx,\n", None, "without smiles: x"),
        ("a.csv", "name,smiles\n,CC\n", None, "1 entries have no name"),
        ("a.csv", "name,smiles,text\nx,CC,y\n", None, "choose one with --kind"),
        ("a.csv", "name,formula,weight\nx,CC,1\n", None, "needs a column sequence, smiles or text"),
        ("a.csv", "drug,smiles,weight\nx,CC,1\n", None, "lacks the column 'name'"),
        ("a.csv", "x,CC\n", None, "without a header: say what they hold with --kind"),
        ("a.csv", "name,smiles\nx,CC\n", "text", "lacks the column 'text'"),
        ("a.csv", 'name,smiles\nx,"CC\n', None, "line 2: unexpected end of data"),
        ("a.csv", b"name,smiles\nx,\xff\xfe\n", None, "not UTF-8"),
        ("a.csv.gz", "name,smiles\n", None, "not UTF-8 text, or the .gz is damaged"),
        ("a.xlsx", "", None, "cannot tell its format"),
    ],
)
def test_input_errors(tmp_path, name, content, kind, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said) as caught:
        read_named_texts(path, kind)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "kind", "expected"),
    [
        ("a.fa", "\ufeff>x one\r\nmk l\r\n\r\nv*\r\n>y\nM\n", None, {"x": "MKLV", "y": "M"}),
        ("a.csv", 'text,Name\n"a, ""cell""\n of two lines",NA\n\n', None, {"NA": 'a, "cell"\n of two lines'}),
        ("a.tsv", "x\tCC\ny\tCCO\n", "smiles", {"x": "CC", "y": "CCO"}),
        ("a.csv", "gene,text\nx,words\n", None, {"x": "words"}),
        ("a.csv", "name,summary\nx,words\n", "text", {"x": "words"}),
        ("a.csv", "id,name,SMILES,weight\n1,x,CC,3\n", None, {"x": "CC"}),
    ],
)
def test_inputs(tmp_path, name, content, kind, expected):
    (tmp_path / name).write_bytes(content.encode())
    found = read_named_texts(tmp_path / name, kind)
    assert dict(zip(found.names, found.texts, strict=True)) == expected


def test_compressed_input(tmp_path):
    import gzip

    with gzip.open(tmp_path / "a.fasta.gz", "wt") as handle:
        handle.write(">x\nMKL\n")
    assert read_named_texts(tmp_path / "a.fasta.gz").texts == ("MKL",)


def test_a_model_trains_with_the_table(tmp_path, run_cli, trained, bert):
    source = csv_of(tmp_path / "in.csv", {"p1": "a cell", "p2": "a tumour cell", "p3": "a T cell"}, "text")
    table, bundle = tmp_path / "vectors.parquet", tmp_path / "bundle"
    assert run_cli("embed", source, "--out", table, "--model", bert, "--device", "cpu").code == 0
    options = ["--embedding", f"perturbation={table}", "--config", "tiny", "--set", "train.max_steps=1"]
    where = [trained / "store", "--split", trained / "split.parquet", "--out", bundle, "--device", "cpu"]
    done = run_cli("train", *where, *options)
    assert done.code == 0, done.err
    weights = safetensors_of(bundle)["covariate_encoder.tables.perturbation.vectors"]
    vectors = EmbeddingTable.read(table).vectors
    assert all((np.abs(weights - vector).max(1) < 1e-6).any() for vector in vectors)


def safetensors_of(bundle):
    from safetensors.numpy import load_file

    return load_file(bundle / "model.safetensors")
