"""What a program leaves changed in the process, for what comes after it: each call changes it, as in eager. Draws from generators of others are among that."""
import numpy as np
import pytest
import torch
import vitrify

SDP, C = torch.backends.cuda, torch._C
SETTINGS = {  # name: get, put, a value, another
    "precision of matrix products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "medium"),
    "oneDNN": (C._get_mkldnn_enabled, C._set_mkldnn_enabled, True, False),
    "oneDNN deterministic": (C._get_mkldnn_deterministic, C._set_mkldnn_deterministic, False, True),
    "cuDNN": (C._get_cudnn_enabled, C._set_cudnn_enabled, True, False),
    "cuDNN benchmark": (C._get_cudnn_benchmark, C._set_cudnn_benchmark, False, True),
    "cuDNN deterministic": (C._get_cudnn_deterministic, C._set_cudnn_deterministic, False, True),
    "flash attention": (SDP.flash_sdp_enabled, SDP.enable_flash_sdp, True, False),
    "math attention": (SDP.math_sdp_enabled, SDP.enable_math_sdp, True, False),
    "attention of less memory": (SDP.mem_efficient_sdp_enabled, SDP.enable_mem_efficient_sdp, True, False),
    "autograd's threads": (torch.autograd.is_multithreading_enabled, torch.autograd.set_multithreading_enabled, True, False),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False, True),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, False, True),
    "swapped parameters": (torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion, False, True),
    "overwritten parameters": (torch.__future__.get_overwrite_module_params_on_conversion, torch.__future__.set_overwrite_module_params_on_conversion, False, True),
    "filled memory": (lambda: torch.utils.deterministic.fill_uninitialized_memory, lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v), True, False),
    "printing": (lambda: torch._tensor_str.PRINT_OPTS.precision, lambda v: torch.set_printoptions(precision=v), 4, 7),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled, True, False),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False, True),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32, torch.float64),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda v: torch.set_autocast_enabled("cpu", v), False, True),
    "autocast's dtype": (lambda: torch.get_autocast_dtype("cpu"), lambda v: torch.set_autocast_dtype("cpu", v), torch.bfloat16, torch.float16),
    "autocast on CUDA": (lambda: torch.is_autocast_enabled("cuda"), lambda v: torch.set_autocast_enabled("cuda", v), False, True),
}


@pytest.mark.eager("for what comes after it", "changes the default dtype", some=True)
@pytest.mark.parametrize("name", SETTINGS)
def test_left_changed_in_every_call(name):
    get, put, before, after = SETTINGS[name]

    def f(x):
        put(after)
        return x * 2
    compiled, was = vitrify.compile(f), get()
    try:
        for _ in range(3):
            put(before)
            assert compiled(torch.ones(2)).tolist() == [2, 2] and get() == after
    finally:
        put(was)


@pytest.mark.eager("it draws from Python's or numpy's random generator")
@pytest.mark.parametrize("draw", [np.random.rand, np.random.standard_normal, lambda: np.random.permutation(3)[0].item()])
def test_draws_from_numpys_own_generator(draw):
    def f(x):
        return x * draw()
    found = []
    for g in (vitrify.compile(f), f):
        np.random.seed(1)
        np.random.standard_normal(1)
        found.append([g(torch.ones(1)).item() for _ in range(4)])
    assert found[0] == found[1]


def put_first(l, x):  # noqa: E741
    l[0] = x * 2
    return x + 1


def put_named(d, x):
    d["a"] = x
    return x + 1


def swap(l, x):  # noqa: E741
    l[0], l[1] = l[1], l[0]
    return x + 1


@pytest.mark.eager("container")
@pytest.mark.parametrize("f, make", [(put_first, lambda: [torch.zeros(2), torch.ones(2)]), (put_named, lambda: {"a": torch.zeros(2)}), (swap, lambda: [torch.zeros(2), torch.ones(2)])])
def test_containers_given_other_tensors(f, make):
    compiled = vitrify.compile(f)
    for _ in range(3):
        ours, theirs = make(), make()
        compiled(ours, torch.full((2,), 5.0)), f(theirs, torch.full((2,), 5.0))
        assert str(ours) == str(theirs)


@pytest.mark.eager("it sets how denormal numbers are computed")
def test_flushed_denormals():
    def f(x):
        torch.set_flush_denormal(True)
        y = x * 1e-30 * 1e-9
        torch.set_flush_denormal(False)
        return y
    compiled = vitrify.compile(f)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), f(torch.ones(2)))
