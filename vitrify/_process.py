"""What a capture changes in the process while it runs, and what the program changed that no replay would repeat."""
import builtins
import functools
import pickle
import random
import sys
import threading

import torch

from . import _C, _fast_path, _numbers
from ._checkpoint import REPLACED

_flag_lock = threading.Lock()
_running: set[int] = set()  # ids of captures


_here = threading.local()  # of the capture on this thread: .refused: why it cannot be; .fused: ids of parameters of fused optimizers


def _refuse(message):
    _here.refused = message  # also if the program catches it
    raise _C.CaptureError(message)


def _refusing(message):
    def make(real):
        def guarded(*args, **kwargs):
            if _C.capturing():
                _refuse(message)
            return real(*args, **kwargs)

        return guarded

    return make


def _is_compiling(real):
    """torch's optimizers read their step counts where nothing compiles them, so that bias corrections are made in double, and its encoders look at masks: those are the
    programs we want."""
    @functools.wraps(real)
    def is_compiling():
        if sys._getframe(1).f_globals.get("__name__", "").startswith(("torch.optim.", "torch.nn.modules.transformer")):
            return False
        return real()

    return is_compiling


def _counts_writes(schema):
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, key) for key in ("ADInplaceOrView", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))


def _counting_as(fused):
    """What the loop over the parameters writes counts as what the fused op writes, where it stands for that."""
    schemas = [getattr(torch.ops.aten, name).default._schema for name in fused.__code__.co_names if name.startswith("_fused_")]
    # Steps are counted up before the op, by another.
    uncounted = sorted({i for s in schemas if not _counts_writes(s)
                        for i, a in enumerate(s.arguments) if a.alias_info and a.alias_info.is_write and a.name != "state_steps"})
    names = fused.__code__.co_varnames[:fused.__code__.co_argcount]

    def make(real):
        @functools.wraps(real)
        def loop(params, *lists, **kwargs):
            stands_for_it = _C.capturing() and any(id(p) in _here.fused for p in params)
            if stands_for_it:  # the fused op takes all steps as they are counted by then, and an element of a gradient as it was
                given = {name: [t for t in ts if t is not None] for name, ts in zip(names, (params, *lists)) if isinstance(ts, list)}
                _, grads, *state = given.values()
                if _C.writes_one_memory_twice([*params, *(t for ts in state for t in ts)], grads):
                    _refuse("a fused optimizer is given one memory twice")
                # It rounds halves once, the loop at each step; it takes the value of a tensor for a number; and it refuses several types.
                types = {t.dtype for name, ts in given.items() if name != "state_steps" for t in ts}
                numbers = {v.dtype for v in kwargs.values() if isinstance(v, torch.Tensor)}
                if len(types) > 1 or not types <= {torch.float32, torch.float64} or not numbers <= {*types, torch.float64}:
                    _refuse("a fused optimizer computes in another type, or in several")
            tensors = [t for i in uncounted for t in (params, *lists)[i] if t is not None] if stands_for_it else []
            versions = [_C.version_of(t) for t in tensors]
            real(params, *lists, **kwargs)
            torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))

        return loop

    return make


def _loops():
    """(module, name of its loop over the parameters, what is there meanwhile)"""
    for optimizer in vars(torch.optim).values():
        module = sys.modules.get(getattr(optimizer, "__module__", None))
        for name, of in vars(module or torch.optim).items() if isinstance(optimizer, type) else ():
            if name.startswith("_fused_") and hasattr(module, loop := name.replace("_fused_", "_single_tensor_")):
                yield module, loop, _counting_as(of)


# (where, name, what is there meanwhile, made of what was): on other threads than the one that captures it does what that did.
_PATCHES = (
    (torch.UntypedStorage, "is_shared", _refusing("asks whether memory is shared between processes")),  # torch ends the process where there is no memory
    (builtins, "print", _refusing("print() inside the program: compiled code would not print")),
    # functions of modules: a class that is written loses the version that guards on its subclasses compare
    *((threading, name, _refusing("it starts a thread")) for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name)),
    *((random, name, _refusing("it sets the state of Python's random generator")) for name in ("seed", "setstate")),
    *((sys.modules["numpy"].random, name, _refusing("it sets the state of numpy's random generator")) for name in ("seed", "set_state") if "numpy" in sys.modules),
    (torch, "set_flush_denormal", _refusing("it sets how denormal numbers are computed")),
    (torch, "compile", _refusing("it calls torch.compile")),  # also torch.cond: frames met under our mode would be marked as never to be compiled
    (torch.compiler, "is_compiling", _is_compiling),
    (torch, "_native_multi_head_attention", _fast_path.attention),
    (torch, "_nested_tensor_from_mask_left_aligned", _fast_path.left_aligned),
    (torch, "_nested_tensor_from_mask", _fast_path.nested),
    (torch, "_transformer_encoder_layer_fwd", _fast_path.encoder_layer),
    (torch, "max_pool1d", _fast_path.pool),
    (builtins, "max", _numbers.extreme),
    (builtins, "min", _numbers.extreme),
    *_loops(),
)


def _modes():
    """(what, value, how to set it) of the modes that a program can leave changed."""
    device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)
    modes = [
        ("grad mode", torch.is_grad_enabled(), torch.set_grad_enabled),
        ("the default dtype", torch.get_default_dtype(), torch.set_default_dtype),
        ("the default device", device, torch.set_default_device),
        ("the number of threads", torch.get_num_threads(), torch.set_num_threads),
        ("deterministic algorithms", (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
         lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1])),
    ]
    c, cuda = torch._C, torch.backends.cuda
    modes += [
        ("the precision of matrix products", torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision),
        ("oneDNN's flags", (c._get_mkldnn_enabled(), c._get_mkldnn_deterministic()), lambda v: (c._set_mkldnn_enabled(v[0]), c._set_mkldnn_deterministic(v[1]))),
        ("cuDNN's flags", (c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic()),
         lambda v: (c._set_cudnn_enabled(v[0]), c._set_cudnn_benchmark(v[1]), c._set_cudnn_deterministic(v[2]))),
        ("the kernels of attention", (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
         lambda v: (cuda.enable_flash_sdp(v[0]), cuda.enable_math_sdp(v[1]), cuda.enable_mem_efficient_sdp(v[2]), cuda.enable_cudnn_sdp(v[3]))),
        ("autograd's threads", c._is_multithreading_enabled(), torch.autograd.set_multithreading_enabled),
        ("anomaly detection", (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), lambda v: torch.set_anomaly_enabled(*v)),
        ("which warnings come again", torch.is_warn_always_enabled(), torch.set_warn_always),
        ("the filling of memory", torch.utils.deterministic.fill_uninitialized_memory, lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v)),
        ("how tensors are printed", dict(vars(torch._tensor_str.PRINT_OPTS)), lambda v: vars(torch._tensor_str.PRINT_OPTS).update(v)),
        *((f"torch.__future__.set_{name}()", getattr(torch.__future__, f"get_{name}")(), getattr(torch.__future__, f"set_{name}"))
          for name in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion")),
    ]
    for d in ("cpu", "cuda"):
        modes.append(("autocast", torch.is_autocast_enabled(d), lambda v, d=d: torch.set_autocast_enabled(d, v)))
        modes.append(("autocast", torch.get_autocast_dtype(d), lambda v, d=d: torch.set_autocast_dtype(d, v)))
    return modes


def _state_of(generator):
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


class Process:
    """torch.compiler.is_compiling() is True meanwhile. put_back() undoes what the program did to random generators and modes, and says what that was."""

    def __init__(self, generators, others=()):
        self.generators = generators
        self.others = [_state_of(g) for g in others]  # Python's and numpy's: (how to get a state, how to put it back)

    def __enter__(self):
        try:
            return self.begin()
        except BaseException:  # an interrupt: nobody calls __exit__
            self.end()
            raise

    def begin(self):
        with _flag_lock:
            if not _running:
                Process.real = [getattr(holder, name) for holder, name, _ in _PATCHES]
            _running.add(id(self))
            if len(_running) == 1:
                torch.compiler._is_compiling_flag = True
                for (holder, name, make), real in zip(_PATCHES, Process.real):
                    setattr(holder, name, make(real))
        REPLACED.begin(id(self))
        _numbers.begin()
        _here.refused, _here.fused = None, set()
        self.random = random.getstate()
        np = sys.modules.get("numpy")
        self.numpy = np.random.get_state() if np is not None and hasattr(np, "random") else None
        self.states = [g.get_state() for g in self.generators]
        self.other_states = [get() for get, _ in self.others]
        self.modes = _modes()
        return self

    def put_back(self):
        changed = _here.refused
        if random.getstate() != self.random:
            random.setstate(self.random)
            changed = "it draws from Python's or numpy's random generator"
        if self.numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            if now[2:] != self.numpy[2:] or now[1].tobytes() != self.numpy[1].tobytes():
                sys.modules["numpy"].random.set_state(self.numpy)
                changed = "it draws from Python's or numpy's random generator"
        for (get, put), state in zip(self.others, self.other_states):
            if pickle.dumps(get()) != pickle.dumps(state):
                put(state)
                changed = "it draws from Python's or numpy's random generator"
        for g, state in zip(self.generators, self.states):
            if not torch.equal(g.get_state(), state):
                if g.device.type != "cpu" or _C.state_set_here(g):  # else another thread has, and draws are taken back by now
                    g.set_state(state)
                changed = "it sets the state of a random number generator"
        for (what, before, put), (_, now, _) in zip(self.modes, _modes()):
            if now != before:
                put(before)
                changed = f"it changes {what} for what comes after it"
        return changed

    def __exit__(self, *exc):
        try:
            self.end()
        except BaseException:  # an interrupt: once more from the start
            self.end()
            raise

    def end(self):
        """What is undone already is undone again."""
        REPLACED.end(id(self))
        with _flag_lock:
            if _running == {id(self)}:
                torch.compiler._is_compiling_flag = False
                for (holder, name, _), real in zip(_PATCHES, Process.real):
                    setattr(holder, name, real)
            _running.discard(id(self))

    def __del__(self):  # an interrupt as __exit__ was called, before its first line
        if id(self) in _running:
            self.end()


def _place(t):
    """Where the memory of a real tensor is, which a program may exchange (`.data =`) without an op; None: nobody knows."""
    if not (type(t) is torch.Tensor or isinstance(t, torch.nn.Parameter)) or t.layout is not torch.strided or _C.is_fake(t):
        return None
    try:
        return _C.address(t), t.shape, t.stride()
    except RuntimeError:  # a placeholder's
        return None


class Floats:
    """Floats of optimizers' groups that calls read anew: symbolic numbers while the program is captured."""

    def __init__(self, groups, live):
        self.values, self.where = [], []  # (group, key, value); per float: (group, key, index in a tuple or -1)
        self.replaced = []
        # The fused ops take numbers only; what they compute is what the loop over the parameters computes.
        self.values += [(group, "fused", True, name) for group, name in groups if group.get("fused") is True]
        for group, name in groups:
            for k, v in group.items():
                if live(group, k):
                    self.values.append((group, k, v, name))
                    self.where += [(group, k, -1)] if type(v) is float else [(group, k, i) for i in range(len(v))]

    def replace(self, session):
        n = 0
        for group, k, v, name in self.values:
            if k == "fused":
                new = False
                _here.fused.update(map(id, group["params"]))
            elif type(v) is float:
                new = session.live_number(n, v)
                n += 1
            else:
                new = tuple(session.live_number(n + i, x) for i, x in enumerate(v))
                n += len(v)
            group[k] = new
            self.replaced.append(new)

    def put_back(self):
        """What the program wrote instead."""
        wrote = [f"{name}.{k}" for (group, k, _, name), new in zip(self.values, self.replaced) if group.get(k) is not new]
        for (group, k, v, _), _ in zip(self.values, self.replaced):
            group[k] = v
        self.replaced = []
        return wrote


def _version(t):
    if _C.is_fake(t):
        return None
    try:
        return t._version
    except RuntimeError:  # of inference
        return None


class Tensors:
    """Attributes of tensors that change without an op: put_back() undoes what it can, and says what changed. `beside`: tensors that are found by way of them."""

    def __init__(self, tensors, beside=()):
        self.before = [self.state(t) for t in tensors]
        self.beside = [self.state(t) for t in beside]
        self.data = {id(t): t.data for t, _, _, place, *_ in (*self.before, *self.beside) if place}

    @staticmethod
    def state(t):
        return t, t.requires_grad, _C.grad_of(t), _place(t), _C.hooks_of(t), dict(vars(t)), type(t), _version(t), t._is_view()

    def new_grads(self):
        """(tensor, its .grad now) where the program left another object there, or None."""
        return [(t, now) for t, _, grad, *_ in self.before if (now := _C.grad_of(t)) is not grad]

    def put_back(self, grads_noted=False):
        changed = None
        states = sorted(enumerate((*self.before, *self.beside)), key=lambda s: s[1][-1])  # what a view needs may be what its base does
        for n, (t, requires_grad, grad, place, hooks, attributes, kind, version, _) in states:
            if type(t) is not kind:
                changed = "it sets the __class__ of a tensor"
                t.__class__ = kind
            if t.requires_grad != requires_grad and t.is_leaf:  # otherwise a write gave it history, which the tracer knows
                changed = "it changes the requires_grad of a tensor"
                t.requires_grad_(requires_grad)
            if _C.grad_of(t) is not grad:
                if not grads_noted or n >= len(self.before):
                    changed = "it sets the .grad of a tensor"
                t.grad = grad
            if place and _place(t) != place:
                changed = "it assigns to the .data of a tensor"
                t.data = self.data[id(t)]
            if _C.hooks_of(t) != hooks:
                changed = "it registers a hook on a tensor"
            if version is not None and _version(t) not in (version, None):
                changed = "it counts a write to a tensor, which it does not write"
                torch._C._autograd._unsafe_set_version_counter((t,), (version,))
            now = vars(t)
            if now.keys() != attributes.keys() or any(now[k] is not v for k, v in attributes.items()):
                changed = f"it sets attributes of a tensor ({', '.join(k for k in {**now, **attributes} if now.get(k) is not attributes.get(k))})"
                now.clear()
                now.update(attributes)
        return changed
