"""Two gloo processes: ranks decide together where shards differ, and 16-bit weights keep synchronising."""

import subprocess
import sys

PRELUDE = """
import sys, warnings, torch, torch.distributed as dist
warnings.simplefilter("ignore")
torch.set_num_threads(1)
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
import halfstep

def same_everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous())
    assert torch.equal(*parts), parts
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
for fused in (True, False):
    for rows in (8, 1):  # with one row, the second rank holds no element of it
        torch.manual_seed(0)
        model = torch.nn.Linear(4, rows, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = halfstep.GradScaler("cpu", init_scale=8.0, model=model)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            local = model.weight.grad.to_local()
            if step == 1 and rank == 0:
                local.view(-1)[0] = float("inf")
            if step == 3 and rank == 0:
                local.view(-1)[0] = 3e38  # finite, but its square is not: both ranks shrink by the same factor
            before = model.weight.full_tensor().clone()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.was_step_applied(optimizer) == (step != 1), (fused, rows, step)
            assert torch.equal(model.weight.full_tensor(), before) == (step == 1)
            assert torch.isfinite(model.weight.full_tensor()).all()
            same_everywhere(torch.tensor(scaler.get_scale()))
        assert scaler.get_scale() == 4.0
        assert (scaler.culprit is not None) == (rank == 0), "only the rank that holds the fault can name it"
dist.destroy_process_group()
print("done")
"""

REPLICATED = """
from torch.nn.parallel import DistributedDataParallel
for dtype in (torch.bfloat16, torch.float16):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 3), float(1 + rank), dtype=dtype)).float().sum()).backward()
        same_everywhere(model.module.weight.grad.float())
        assert model.module.weight.grad[0, 0].item() == 24.0  # 8 * the mean of 2 and 4
        scaler.step(optimizer)
        scaler.update()
        same_everywhere(model.module.weight.detach().float())
dist.destroy_process_group()
print("done")
"""


def run_two(script, store):
    command = [sys.executable, "-c", PRELUDE + script, str(store)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert out.strip() == "done", err[-2000:]


def test_ranks_that_hold_shards_skip_together(tmp_path):
    run_two(SHARDED, tmp_path / "store")


def test_16_bit_weights_keep_synchronising_under_ddp(tmp_path):
    run_two(REPLICATED, tmp_path / "store")
