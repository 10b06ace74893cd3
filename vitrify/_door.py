"""compile(): what happens when no compiled entry matches a call. Hits never come here (src/python/entry.cpp)."""
import difflib
import functools
import gc
import inspect
import sys
import threading
import time
import traceback
import types
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C, _messages, _module_hooks, _numbers, _plain, _trees, _twin  # noqa: F401  (_trees, _numbers and _plain install their hooks)
from ._marks import UNBOUNDED
from ._process import Floats, Process, Tensors
from ._reproduce import write_reproducer
from ._sources import Sources, Unready

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_doors = weakref.WeakSet()


class _CaptureMode(TorchDispatchMode):
    """Stands for the tracer on torch's mode stack; the tracer takes every op before this object is asked."""


# ---- one compiled callable

EAGER, READY = "eager", "ready"


class Failed:
    """A capture that stopped. Whether the user's program is to blame shows when it runs eagerly."""

    def __init__(self, exc, reason, ours, place=None):
        self.place = place or _messages.user_frame(exc)
        self.exc, self.reason, self.ours = exc.with_traceback(None), reason, ours


class Door:
    def __init__(self, target, settings):
        self.settings = settings
        self.options = _make_options(settings)
        self.name = settings["name"] or getattr(target, "__qualname__", None) or type(target).__name__
        self.fullgraph = settings["fullgraph"]
        self.dynamic = settings["dynamic"]
        self.limit = self.options.get("recompile_limit")
        self.lock = threading.RLock()
        self.warned = set()
        self.moving = set()      # (tensor name, dim) seen with more than one size
        self.write_attempts = 0
        self.grad_attempts = 0
        self.moving_floats = set()   # keys of optimizers' groups, beside lr, seen with more than one value
        self.group_floats = {}       # (number of the group, key) -> last value
        self.full = False
        self.target = target
        self.passed = None       # containers that the program under capture was given, and how many refer to each
        self.inner = None        # a callable that the program is no more than a call of
        self.within = None       # the door of the forward of a module whose hooks run around that
        self.bare = None         # that module, of such a door
        _doors.add(self)

    def attach(self, original, root):
        self.original, self.root = original, root
        self.state = _C.make_state(original, self.miss)
        self.state.settings = self.settings
        if self.settings["disable"] or _C.environment_flag("VITRIFY_DISABLE_ALL"):
            _C.note_eager("compilation is off")
            _C.state_off(self.state, True)
        return self.state

    def reset(self):
        with self.lock:
            _C.state_clear(self.state)
            self.warned.clear()
            self.moving.clear()
            self.moving_floats.clear()
            self.group_floats.clear()
            self.write_attempts, self.grad_attempts, self.full = 0, 0, False

    # -- a call that no entry matches
    def miss(self, state, args, kwargs):
        if isinstance(self.root, nn.Module) and self.bare is None and _module_hooks.run_around(self.root, state):
            return _module_hooks.call(self.root, self.forward_state(), args, kwargs)
        for _ in range(2):  # the plan of the first may find that the program goes another way than it could know
            with self.lock:
                verdict = READY if _C.state_has(state, args, kwargs) else self.prepare(args, kwargs)
            if verdict is not READY:
                break
            hit = _C.state_call(state, args, kwargs)
            if hit is not None:
                return hit[0]
        failed = verdict if isinstance(verdict, Failed) else None
        why = _C.state_refused(state)
        if why:
            _C.state_settle(state)
        if failed and failed.ours and self.fullgraph and not why:
            self.refuse(failed.reason, failed.place, failed.exc)
        _C.count("eager_calls")
        if why:
            _C.note_eager(why)
        result = _C.state_call_eagerly(state, args, kwargs)  # an error of the user's comes from here, as eager raises it
        if failed and not (why and self.fullgraph):
            self.refuse(failed.reason, failed.place, failed.exc)
        return result

    def forward_state(self):
        with self.lock:
            if self.within is None:
                module = self.root
                self.within = Door(self.target, self.settings)
                self.within.bare = module
                self.within.attach(lambda *args, **kwargs: module.forward(*args, **kwargs), module)
            return self.within.state

    def refuse(self, reason, place=None, exc=None):
        """One warning per reason, or an error under fullgraph."""
        at = f" ({_messages.where(place)})" if place else ""
        if self.fullgraph:
            raise _C.CaptureError(f"{self.name} cannot be captured: {reason}{at}") from exc
        _C.count("fallbacks")
        _C.note_eager(reason)
        if (reason, place) not in self.warned:
            self.warned.add((reason, place))
            _messages.warn(f"vitrify: {self.name} runs eagerly: {reason}{at}", place)
        return EAGER

    def prepare(self, args, kwargs):
        entries = _C.state_entries(self.state)
        if len(entries) >= self.limit:
            return self.at_limit(entries, args, kwargs)
        try:
            signature = _C.Signature(args, kwargs)
        except _C.CaptureError as e:
            return self.refuse(str(e))
        if signature.refusal:
            return self.refuse(signature.refusal)
        compiled = [old for graph, old in entries if graph is not None]
        if compiled and self.options.get("error_on_recompile"):
            if _C.state_refused(self.state):
                return EAGER
            raise _C.RecompileError(f"{self.name} would be compiled again: {_difference(signature, compiled[0])}")
        start = time.perf_counter_ns()
        try:
            sources = Sources()
            self.visit(sources, signature)
            sources.finish(self.is_live)
            self.compare_floats(sources)
        except Unready:
            _C.note_eager("it cannot be captured yet: a lazy module has no parameters")
            return EAGER
        except _C.CaptureError as e:
            return self.refuse(str(e))
        _C.add_stage_time("sources", (time.perf_counter_ns() - start) // 1000)
        marks = self.dim_marks(signature, args, kwargs, compiled)
        outcome = self.compile(signature, sources, marks)
        if isinstance(outcome, Failed) and any(m[0] for dims in marks for m in dims):
            outcome = self.compile(signature, sources, [[] for _ in marks])
        if outcome is READY and compiled:
            _C.count("recompiles")
        elif isinstance(outcome, Failed) and not isinstance(outcome.exc, Warning) and not _C.state_refused(self.state):
            # Else other calls of this signature have a plan; a warning is an error only while Python's filters say so.
            _C.state_add(self.state, signature, sources.guards, None, None, sources.grads(), [], [])
        return outcome

    def is_live(self, group, key):
        """Floats of optimizers that calls read anew: learning rates, and what was seen to change."""
        v = group[key]
        return (key == "lr" or key in self.moving_floats) and (type(v) is float or type(v) is tuple and all(type(x) is float for x in v))

    def compare_floats(self, sources):
        for n, (group, _) in enumerate(sources.groups):
            for k, v in group.items():
                if type(v) in (float, tuple) and self.group_floats.setdefault((n, k), v) != v:
                    self.moving_floats.add(k)  # from the next capture on
                    self.group_floats[n, k] = v

    def visit(self, sources, signature):
        sources.bare = self.bare
        for o in signature.objects:
            sources.visit(o, "an argument")
        sources.visit(self.root, "self" if isinstance(self.root, nn.Module) else self.name)
        sources.visit(self.inner, self.name)
        # a scheduler's wrapper around the step of its optimizer
        for cell in getattr(self.root, "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, weakref.ref) and isinstance(held(), torch.optim.Optimizer):
                sources.visit(held(), "the optimizer")

    def at_limit(self, entries, args, kwargs):
        compiled = [old for graph, old in entries if graph is not None]
        message = f"vitrify: {self.name} reached recompile_limit={self.limit}: calls with other signatures run eagerly from now on"
        if compiled:
            try:
                message += f" (last miss: {_difference(_C.Signature(args, kwargs), compiled[0])}; use mark_dynamic for sizes that change, or raise recompile_limit)"
            except _C.CaptureError:
                pass
            if self.fullgraph:
                raise _C.RecompileError(message)
        _C.note_eager("recompile_limit is reached")
        if not self.full:
            self.full = True
            _messages.warn(message)
        return EAGER

    def dim_marks(self, signature, args, kwargs, compiled):
        """Per tensor and dim: (dynamic, min, max)."""
        sizes = signature.sizes()
        for old in compiled:
            if self.dynamic is False or not old.same_modes(signature) or old.same_tree(args, kwargs) is None:
                continue
            for name, now, before in zip(signature.names, sizes, old.sizes()):
                if len(now) == len(before):
                    self.moving.update((name, d) for d, (a, b) in enumerate(zip(now, before)) if a != b)
        marks = []
        for t, name, size in zip(signature.tensors, signature.names, sizes):
            explicit = getattr(t, "_vitrify_dims", {})
            dims = [explicit.get(d, (self.dynamic is True or (name, d) in self.moving, 2, UNBOUNDED)) for d in range(len(size))]
            # 0 and 1 broadcast: they are always compiled as constants
            dims = [(dyn and n > 1, max(lo, 2), hi) for (dyn, lo, hi), n in zip(dims, size)]
            marks.append(dims if any(d[0] for d in dims) else [])
        return marks

    def compile(self, signature, sources, marks):
        start = time.perf_counter_ns()
        for settles in (False, True):
            session, done = self.record(signature, sources, marks, settles)
            # It may have gone where the call does not.
            if not isinstance(done, Failed) or not session.takes_other_sizes:
                break
        passed, self.passed = self.passed, None
        _C.add_stage_time("capture", (time.perf_counter_ns() - start) // 1000)
        if isinstance(done, Failed):
            return done
        program, result, changed, wrote, floats, tensors, settled = done
        _C.count("captures")
        if changed:
            return Failed(_C.CaptureError(), changed, True)
        if wrote:
            # Caches fill on the first eager runs; what still writes after that is an effect.
            self.write_attempts += 1
            if self.write_attempts <= 2:
                _C.note_eager(f"it writes Python state, as caches do at first: {', '.join(wrote[:4])}")
                return EAGER
            return Failed(_C.CaptureError(), f"it writes Python state on every call: {', '.join(wrote[:4])}", True)
        if any(now != (t.grad is not None) for t, *_ in tensors.before if (now := settled.get(id(t))) is not None) and not self.grad_attempts:
            self.grad_attempts += 1  # gradients that are there from the first call on
            _C.note_eager("it makes gradients that are there from the first call on")
            return EAGER
        if isinstance(program, _C.JointProgram) and program.needs_grad and _kept(*passed):
            return Failed(_C.CaptureError(), "it keeps a container that was passed in, which a backward of its own may read", True)
        try:
            graph = self.build(session, program)
        except _C.CaptureError as e:  # it costs more than a compile may
            return Failed(e, str(e), True)
        except (_C.CompilerError, MemoryError, RuntimeError) as e:
            return self.compiler_failed(e, program, signature, sources)
        result.forget_tensors()
        _C.state_add(self.state, signature, sources.guards, graph, result, sources.grads(), floats.where, [t for t, _, _ in sources.tensors.values()])
        return READY

    def record(self, signature, sources, marks, settles):
        """A capture's session, and what it has made, or Failed. All is put back."""
        session = _C.Session(_CaptureMode(), self.name, self.state, settles)
        session.declare_state(sources.guards)
        reached = [t for t, _, _ in sources.tensors.values()]
        tensors = Tensors(reached, self.beside(reached, signature.tensors, sources))
        floats = Floats(sources.groups, self.is_live)
        with _C.CaptureTurn(), Process(sources.generators, sources.random) as process:
            interrupt = failed = None
            try:
                program, result = self.capture(session, signature, sources, marks, tensors, floats)
            except BaseException as e:
                # What frames hold ends with them: a checkpoint's takes its hooks off a stack, which is then to be as it was before.
                place = _messages.user_frame(e)
                if _messages.comes_from_outside(e):
                    interrupt, self.passed = e, None
                    traceback.clear_frames(e.__traceback__)
                else:
                    e.with_traceback(None)
                session.abort()
                if not interrupt:
                    reason = session.failure or _messages.first_line(e)
                    failed = Failed(e, reason, session.failure is not None or isinstance(e, _C.CaptureError), place)
            wrote = floats.put_back()
            wrote += sources.guards.undo_writes() + sources.empty_caches()
            settled = {id(t): t.grad is not None for t, _ in tensors.new_grads()}
            changes = tensors.put_back(grads_noted=True), process.put_back()  # both, whatever the first says
            if interrupt:
                try:
                    raise interrupt
                finally:
                    interrupt = None  # else this frame and the traceback hold one another
        return session, failed or (program, result, changes[0] or changes[1], wrote, floats, tensors, settled)

    def beside(self, reached, given, sources):
        """What the program may find by way of the tensors it reaches or is given: gradients, and what they are views of."""
        known, found = set(map(id, (*reached, *given))), []
        for t in (*reached, *given):
            for o in (_C.grad_of(t) if sources.looks_at_grads() else None, _base(t)):
                if o is not None and id(o) not in known:
                    known.add(id(o))
                    found.append(o)
        return found

    def capture(self, session, signature, sources, marks, tensors, floats):
        for t, name in zip(signature.tensors, signature.names):  # which placeholders do not have
            if read := sources.attributes_read(t):
                raise _C.CaptureError(f"{name} has the attribute {min(read)}, which the program may read")
        fakes = [session.add_input(t, 0, name, dims) for t, name, dims in zip(signature.tensors, signature.names, marks)]
        for t, kind, name in sources.tensors.values():
            session.declare_source(t, kind, name)
        for t in sources.grads():
            if (grad := _C.grad_of(t)) is not None:
                if not t.is_leaf:
                    raise _C.CaptureError("it may look at the .grad of a tensor that is not a leaf")
                if grad.shape != t.shape:
                    raise _C.CaptureError("a tensor, whose .grad it may look at, has been given another size since")
                session.declare_grad(t, grad)
        for t, name in zip(signature.tensors, signature.names):
            if (grad := _C.grad_of(t)) is None:
                continue
            if t.is_leaf:
                session.declare_grad(t, grad)
            elif sources.looks_at_grads():
                raise _C.CaptureError(f"it may look at the .grad of {name}, which is not a leaf")
        for g in sources.generators:
            session.declare_generator(g)
        placeholders = Tensors(fakes)
        args, kwargs = signature.rebuild(fakes)
        passed = _containers((*args, *kwargs.values()))
        self.passed = passed, [sys.getrefcount(c) for c in passed], args, kwargs
        session.start(self.options.get("compile_budget_s"))
        floats.replace(session)
        with _module_hooks.NotCalled(self.bare):
            held = [self.original(*args, **kwargs)]
        now = signature.same_tree(args, kwargs)
        if now is None or any(a is not b for a, b in zip(now, fakes)):
            raise _C.CaptureError("it changes a container that was passed in")
        grads = placeholders.new_grads() + tensors.new_grads()
        for t, grad in grads:
            if grad is not None and _C.grad_of(grad) is not None:
                raise _C.CaptureError("it sets the .grad of a gradient")
            session.note_grad(t, grad)
        if changed := placeholders.put_back(grads_noted=True):
            raise _C.CaptureError(changed)
        _trees.check_made(held, sources.seen)
        result = _C.Result(held.pop(), signature, sources.seen)
        _numbers.check_gone()
        self.check_results([t for t in result.tensors if id(t) not in sources.tensors and not any(t is f for f in fakes)])
        finish = session.finish_joint if signature.grad or session.makes_gradients(result.tensors) else session.finish
        return finish(result.tensors), result

    def build(self, session, program):
        if not isinstance(program, _C.JointProgram):
            return _C.compile(program, self.options)
        if not program.needs_grad:
            return _C.compile(program.program, self.options)
        return _C.compile_training(program, session, self.options)

    def check_results(self, made):
        for t in made:
            if isinstance(t, nn.Parameter):
                raise _C.CaptureError("it returns a new Parameter")
            if _C.grad_of(t) is not None:
                raise _C.CaptureError("it returns a tensor whose .grad it has set")
            if vars(t):
                raise _C.CaptureError(f"it returns a tensor with attributes of its own ({', '.join(vars(t))})")

    def compiler_failed(self, e, program, signature, sources):
        what = _messages.first_line(e)
        path = write_reproducer(program, self.settings, signature.describe(), what)
        message = f"vitrify: internal error while compiling {self.name}: {what}; it runs eagerly. Reproducer: {path} (replay: python -m vitrify replay {path}, or vitrify-opt {path})"
        if self.fullgraph:
            error = _C.CompilerError(message)
            error.reproducer = path
            raise error from e
        _C.count("fallbacks")
        _C.note_eager(f"internal error while compiling: {what}")
        _messages.warn(message)
        if not _C.state_refused(self.state):
            _C.state_add(self.state, signature, sources.guards, None, None, sources.grads(), [], [])
        return EAGER


def _base(t):
    try:
        return t._base
    except RuntimeError:  # a view whose history cannot be made anew: eager raises where it is read
        return None


def _containers(parts):
    """Those that a program can change, in what it is given."""
    found, todo = [], list(parts)
    while todo:
        o = todo.pop()
        if type(o) in (list, dict):
            found.append(o)
        if isinstance(o, (tuple, list, dict)):
            todo.extend(o.values() if isinstance(o, dict) else o)
    o = None  # noqa: F841
    return found


def _kept(containers, counts, *holders):
    """Whether something holds on to containers that the program was given, beside what held them when it began."""
    def now():
        return [sys.getrefcount(c) for c in containers]
    return now() != counts and (gc.collect(), now() != counts)[1]


def _difference(new, old):
    for a, b in zip(new.describe(), old.describe()):
        if a != b:
            return f"{a}, compiled for {b}"
    return "other argument values, modes or Python state"


def _make_options(settings):
    options = _C.Options()
    for name, value in (settings["options"] or {}).items():
        if not isinstance(name, str):
            raise _C.OptionError(f"option names are strings, not {type(name).__name__}")
        options.set(name, value)
    return options


# ---- the API

def _check(name, value, kinds, what):
    if not isinstance(value, kinds):
        raise _C.OptionError(f"{name} takes {what}, not {type(value).__name__}")


def compile(target=None, *, mode="default", dynamic=None, fullgraph=False, options=None, disable=False, name=None):
    """A compiled version of a module or function, compiled at the first call of each signature.

    A function gives a function with the same signature; a module gives a twin that shares everything with it (parameters, hooks, state_dict).
    mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs". dynamic: None (sizes that change become dynamic), True or False.
    fullgraph: raise CaptureError instead of running eagerly what cannot be captured. options: see vitrify.options().
    Without a target: a decorator.
    """
    _check("mode", mode, str, "a string")
    if mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, 2, 0.3) or MODES
        raise _C.OptionError(f"unknown mode '{mode}'; did you mean {' or '.join(repr(m) for m in close)}?")
    _check("dynamic", dynamic, (bool, type(None)), "True, False or None")
    _check("fullgraph", fullgraph, bool, "True or False")
    _check("disable", disable, bool, "True or False")
    _check("options", options, (dict, type(None)), "a dict")
    _check("name", name, (str, type(None)), "a string")
    settings = dict(mode=mode, dynamic=dynamic, fullgraph=fullgraph, options=options, disable=disable, name=name)
    _make_options(settings)
    if target is None:
        return functools.partial(compile, **settings)
    if isinstance(target, nn.Module):
        original = _C.twin_original(target)
        return _compile_module(target if original is None else original, settings)
    if isinstance(target, type) or not callable(target):
        raise _C.OptionError(f"compile takes a module or a function, not {'the class ' + target.__name__ if isinstance(target, type) else type(target).__name__}")
    return _compile_callable(target, settings)


def _compile_module(module, settings):
    door = Door(module, settings)
    return _twin.make(module, door.attach(module, module))


def _copy_function(f):
    g = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    g.__kwdefaults__ = f.__kwdefaults__
    for attribute in ("__annotations__", "__doc__", "__module__", "__qualname__", "__type_params__"):
        setattr(g, attribute, getattr(f, attribute))
    g.__dict__.update({k: v for k, v in f.__dict__.items() if k != "__vitrify__"})
    return g


def _compile_callable(target, settings):
    if getattr(target, "_vitrify_disabled", False):
        return target
    if isinstance(target, types.MethodType):
        return types.MethodType(_compile_callable(target.__func__, settings), target.__self__)
    inner = None
    if not isinstance(target, types.FunctionType):
        inner = target

        def target(*args, **kwargs):
            return inner(*args, **kwargs)

        functools.update_wrapper(target, inner, updated=())
    elif (state := _C.installed_state(target)) is not None:
        target = state.plain  # compiled already: the new settings hold
    if target.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        if settings["fullgraph"]:
            raise _C.CaptureError(f"{target.__qualname__} is a generator or coroutine function")
        _C.note_eager("generator and coroutine functions are not compiled")
        _messages.warn(f"vitrify: {target.__qualname__} runs eagerly: generator and coroutine functions are not compiled")
        return target
    plain, compiled = target, _copy_function(target)
    door = Door(target, settings)
    door.inner = inner
    state = door.attach(plain, plain)
    state.plain = plain
    _C.install(compiled, state)
    return compiled


def compile_(module, **settings):
    """Compiles a module in place: module(...) is compiled from now on. Takes the keywords of compile()."""
    if not isinstance(module, nn.Module):
        raise _C.OptionError(f"compile_ takes a module, not {type(module).__name__}")
    compile(**settings)  # checks them
    defaults = dict(mode="default", dynamic=None, fullgraph=False, options=None, disable=False, name=None)
    original = _C.twin_original(module)
    module = module if original is None else original
    module._compiled_call_impl = Door(module, {**defaults, **settings}).attach(module._call_impl, module)
    return module


def compile_regions(model, classes, **settings):
    """Compiles each instance of `classes` (a module class, or several) inside a module in place, as compile_ does, and returns the module.

    What is alike is compiled once: blocks that differ in their tensors only share kernels and plans. Takes the keywords of compile().
    """
    if not isinstance(model, nn.Module):
        raise _C.OptionError(f"compile_regions: `model` takes a module, not {type(model).__name__}")
    classes = tuple(classes) if isinstance(classes, (tuple, list, set, frozenset)) else (classes,)
    for c in classes:
        if not (isinstance(c, type) and issubclass(c, nn.Module)):
            raise _C.OptionError(f"compile_regions: `classes` takes module classes, not {c!r}")
    compile(**settings)  # checks them
    found = [m for m in model.modules() if isinstance(m, classes)]
    missing = [c.__name__ for c in classes if not any(isinstance(m, c) for m in found)]
    if missing or not classes:
        raise _C.OptionError(f"compile_regions: `classes`: {type(model).__name__} has no module of class {' or '.join(missing) or '()'}")
    for m in found:
        compile_(m, **settings)
    return model


def disable(fn=None, *, recursive=True, reason=None):
    """The function is never compiled; a program that calls it runs eagerly."""
    if fn is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    if not callable(fn):
        raise _C.OptionError(f"disable takes a function, not {type(fn).__name__}")

    @functools.wraps(fn)
    def disabled(*args, **kwargs):
        if _C.capturing():
            _C.refuse(f"{getattr(fn, '__qualname__', fn)} is disabled{': ' + reason if reason else ''}")
        return fn(*args, **kwargs)

    disabled._vitrify_disabled = True
    return disabled


def is_compiling():
    """True while a program is captured (as torch.compiler.is_compiling())."""
    return _C.capturing() or torch.compiler.is_compiling()


def _forgetting(swap):
    """What is compiled holds its weights, and torch swaps none that something else holds."""
    @functools.wraps(swap)
    def swap_tensors(t1, t2):
        for t in (t1, t2):
            if isinstance(t, torch.Tensor):
                for door in list(_doors):
                    _C.state_forget(door.state, t)
        return swap(t1, t2)
    return swap_tensors


torch.utils.swap_tensors = _forgetting(torch.utils.swap_tensors)


def _without_symbols(check):
    """Checks of plain conditions, which ATen's Meta kernels in Python are full of; the first of torch's own imports all of sympy, half a second of a first call."""
    def quick(error_type, cond, message):
        if cond is not True:
            check(error_type, cond, message)
    return functools.wraps(check)(quick)


torch._check_with = _without_symbols(torch._check_with)


def reset():
    """Forgets everything compiled in this process and sets the counters to zero."""
    for door in list(_doors):
        door.reset()
    _C.reset_counters()
