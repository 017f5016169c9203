import logging
import os

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which would cost each forked rank seconds

pytest.register_assert_rewrite("tests.jobs")

# Forked ranks must not inherit a thread pool.
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# A Ray that somebody else runs on this machine is not for tests.
os.environ["RAY_ADDRESS"] = "local"


@pytest.fixture(autouse=True)
def _info_lines(caplog):
    caplog.set_level(logging.INFO, logger="pimm_ray")
