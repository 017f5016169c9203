import logging
import os

import pytest
import torch

pytest.register_assert_rewrite("tests.jobs")

# Forked ranks must not inherit a thread pool.
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


@pytest.fixture(autouse=True)
def _info_lines(caplog):
    caplog.set_level(logging.INFO, logger="pimm_ray")
