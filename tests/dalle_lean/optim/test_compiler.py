import subprocess
import sys


def test_a_program_that_compiles_nothing_takes_its_steps_without_torchs_compiler():
    script = """
import sys, torch
from dalle_lean.optim.lamb import Lamb
weight = torch.nn.Parameter(torch.ones(3))
optimizer = Lamb([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
