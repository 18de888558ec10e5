"""Sharded parameters (FSDP2): the local part is inspected, unscaled and stepped; ranks agree in a later release."""

import subprocess
import sys

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
import warnings; warnings.simplefilter("ignore")
import halfstep

for fused in (True, False):
    torch.manual_seed(0)
    model, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    make = lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused)
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0, model=model)
    for step in range(4):
        optimizer.zero_grad(); reference.zero_grad()
        bad = step == 1
        scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if bad else 1.0)).backward()
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.was_step_applied(optimizer) != bad
        if not bad:
            plain(torch.ones(2, 4)).sum().backward()
            reference.step()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(ours.full_tensor(), theirs), (fused, step)
    assert scaler.culprit.name == "bias" and scaler.get_scale() == 512.0
dist.destroy_process_group()
print("done")
"""


def test_fsdp2_parameters(tmp_path):
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], capture_output=True, text=True)
    assert result.stdout.strip() == "done", result.stderr[-2000:]
