"""Samplers that fail, where a process started anew can import them."""

import os

from perturbdiff.runtime.errors import UserError


def user_error(device):
    raise UserError("the store is upside down")


def bug(device):
    return [][0]


class Deadly:
    def __init__(self, device):
        self.device = device

    def draw(self, sets):
        if sets == ["deadly"]:
            os._exit(137)
        return sets, self.device
