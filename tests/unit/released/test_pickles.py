"""The restricted reader: what it reads, what it refuses, and that nothing runs."""

import os
import pickle
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from perturbdiff.released.pickles import plain, read_pickle, read_torch
from perturbdiff.runtime.errors import UserError

DATA = Path(__file__).parents[2] / "parity" / "data"


class Evil:
    """Runs a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def attacks(mark: Path) -> dict[str, Evil]:
    command = f"touch {mark}"
    return {
        "system": Evil(os.system, command),
        "eval": Evil(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Evil(getattr, Path(mark), "touch"),
        "open": Evil(open, str(mark), "w"),
        "load": Evil(torch.load, str(mark)),
        "import": Evil(__import__, "antigravity"),
    }


@pytest.mark.parametrize("kind", ["system", "eval", "getattr", "open", "load", "import"])
@pytest.mark.parametrize("reader", ["torch", "pickle"])
def test_nothing_runs(tmp_path, kind, reader):
    mark, path = tmp_path / "ran", tmp_path / "model.ckpt"
    content = {"state_dict": {"a": torch.zeros(2)}, "hyper_parameters": {"x": [attacks(mark)[kind]]}}
    if reader == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(attacks(mark)[kind]))
    with pytest.raises(UserError, match=r"refused, it asks to load '.+'.* nothing was run") as error:
        (read_torch if reader == "torch" else read_pickle)(path)
    assert not mark.exists()
    assert "antigravity" not in sys.modules
    asked = {"system": "posix.system", "eval": "builtin", "getattr": "getattr", "open": "io", "load": "torch"}
    assert asked.get(kind, "__import__") in str(error.value)


def test_the_attack_works_on_an_ordinary_reader(tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(attacks(mark)["system"]))
    assert mark.exists()


def test_a_checkpoint_with_configuration_containers():
    content = read_torch(DATA / "tiny_step23.ckpt")
    settings = plain(content["hyper_parameters"])
    assert settings["model_cfg"]["hidden_num"] == [96, 32]
    assert settings["model_cfg"]["p_drop_cond"] == 0.5
    assert settings["cov_encoding_cfg"]["pert_dict"] == {
        "CYT0": 0, "CYT1": 1, "CYT2": 2, "CYT3": 3, "CYT4": 4, "PBS": 5,
    }  # fmt: skip
    assert settings["py_logger"] is None
    assert settings["all_split_names"] == ["validation", "test"]
    assert "omegaconf" not in sys.modules

    def types(value):
        if isinstance(value, dict):
            return set().union(*(types(k) | types(v) for k, v in value.items()), {dict})
        return set().union(*map(types, value), {list}) if isinstance(value, list) else {type(value)}

    assert types(settings) <= {dict, list, str, int, float, bool, type(None)}


def test_the_same_tensors_as_an_ordinary_reader(tmp_path):
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    content = {
        "state_dict": OrderedDict(a=base, b=base[1:3], c=base.T, d=torch.arange(3), e=torch.tensor(2.0)),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(base[0]),
        "more": defaultdict(list, x=[1, (2, "y")]),
        "scalars": [np.float64(1.5), np.int32(3), np.str_("é"), np.bool_(True)],
    }
    torch.save(content, tmp_path / "a.ckpt")
    found = read_torch(tmp_path / "a.ckpt")
    for name, tensor in content["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], tensor, rtol=0, atol=0)
    torch.testing.assert_close(found["half"], content["half"])
    torch.testing.assert_close(found["parameter"], base[0])
    assert plain(found["more"]) == {"x": [1, [2, "y"]]}
    assert plain(found["scalars"]) == [1.5, 3, "é", True]


def test_what_is_no_checkpoint(tmp_path):
    good = (DATA / "tiny_final_weights_only.ckpt").read_bytes()
    path = tmp_path / "a.ckpt"
    with pytest.raises(UserError, match="not found"):
        read_torch(path)
    for content, message in ((b"text", "zip"), (good[:5000], "zip"), (good[:-200], "zip|damaged")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_torch(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(UserError, match="TorchScript"):
        read_torch(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}) * 100)
    with pytest.raises(UserError, match="compressed"):
        read_torch(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}q\x00(X")
    with pytest.raises(UserError, match="damaged"):
        read_torch(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="holds a list"):
        read_torch(path)


def test_a_file_cannot_change_what_the_next_one_meets(tmp_path):
    """A pickle may set attributes on what it names; stand-ins are made anew for every file."""
    path = tmp_path / "a.pkl"
    opcodes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__Nsb."
    path.write_bytes(opcodes)
    read_pickle(path)
    assert torch._utils._rebuild_tensor_v2.__defaults__ == (None,)
    path.write_bytes(b"\x80\x02ccollections\nOrderedDict\n}X\x06\x00\x00\x00updateNs\x86b.")
    with pytest.raises(UserError):
        read_pickle(path)
    assert OrderedDict(a=1) == {"a": 1}


def test_recursion_ends(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".")  # a list in a list in a list …
    with pytest.raises(UserError, match="nested"):
        read_pickle(path)
