"""Other compilers, measured in the same run as Vitrify. The package never imports this file by itself; `--peers` does."""
import torch


def torch_compile(module):
    torch._dynamo.reset()
    return torch.compile(module)


PEERS = {"torch.compile": torch_compile}
