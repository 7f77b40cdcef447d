"""Addresses of files: what the registry writes, and what a program asks for.

``hf://datasets/OWNER/NAME@REVISION/PATH`` is a file of the Hugging Face Hub and ``gs://BUCKET/PATH`` one of Google
Cloud Storage. Both can be read by plain HTTPS, so that no further library is needed.
"""

from __future__ import annotations

import os
import re
import urllib.parse

_HUB = re.compile(r"hf://(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)/(?P<path>.+)")


def web_address(url: str) -> str:
    """Return the https address of a file.

    ``HF_ENDPOINT`` names another hub than huggingface.co, as for the hub's own library.
    """
    if found := _HUB.fullmatch(url):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        kind, path = found["kind"] or "", urllib.parse.quote(found["path"])
        return f"{hub}/{kind}{found['name']}/resolve/{found['revision']}/{path}"
    if url.startswith("gs://"):
        return f"https://storage.googleapis.com/{urllib.parse.quote(url[5:])}"
    return url


def host(url: str) -> str:
    """Return the name of the machine that a file is asked of."""
    return urllib.parse.urlsplit(web_address(url)).hostname or url


def by_hand(url: str, folder: str) -> str:
    """Return how a user can fetch a file that a program is not given."""
    if url.startswith("gs://"):
        return (
            "where the reader pays, the bucket wants to know whom to bill: "
            f"gcloud storage cp --billing-project=YOUR_PROJECT {url} {folder}/"
        )
    if url.startswith("hf://"):
        return "look at its page on the Hugging Face Hub, which may ask you to accept terms"
    return f"download {url} with a browser into {folder}"
