"""What an optimizer takes from a checkpoint, and what it keeps."""

from __future__ import annotations

import torch

from mpiddp.sync.parameter_server.server import load_optimizer_state


def test_moments_are_loaded_and_options_stay() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    before = torch.optim.SGD([parameter], 0.1, 0.9, weight_decay=0.0, fused=True)
    before.step()
    after = torch.optim.SGD([parameter], 0.1, 0.5, weight_decay=0.2, foreach=True)
    load_optimizer_state(after, before.state_dict())
    assert torch.equal(after.state[parameter]["momentum_buffer"], parameter.grad)
    (group,) = after.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.2)
    assert (group["fused"], group["foreach"]) == (None, True)
    assert group["params"] == [parameter]
