"""An untrained encoder of proteins in the files that published ones have, small enough for a test."""

import json
from pathlib import Path

ESM_TOKENS = [
    "<cls>",
    "<pad>",
    "<eos>",
    "<unk>",
    *"LAGVSERTIDPKQNFYMHWCXBUZO",
    ".",
    "-",
    "<null_1>",
    "<mask>",
]


def write_esm(folder: Path) -> Path:
    """A masked-LM checkpoint with the files of ESM2: vocab.txt and no pooler; 16 numbers in a vector."""
    import torch
    import transformers

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(ESM_TOKENS))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    special = {"pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
    config = transformers.EsmConfig(
        vocab_size=len(ESM_TOKENS),
        position_embedding_type="rotary",
        max_position_embeddings=34,
        emb_layer_norm_before=False,
        **shape,
        **special,
    )
    transformers.EsmForMaskedLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "EsmTokenizer"}))
    return folder
