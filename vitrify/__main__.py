"""python -m vitrify options | doctor | replay FILE | demo | bench"""
import argparse
import json
import os
import platform
import sys


def show_options(_):
    import vitrify

    print(vitrify.options())
    return 0


def doctor(_):
    """Does everything work here? One line per check; the exit status says whether all passed."""
    import torch

    import vitrify

    print(f"vitrify {vitrify.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"threads: {torch.get_num_threads()}; CUDA: {torch.version.cuda or 'not built in'}, {torch.cuda.device_count()} device(s)")

    def check(what, f):
        try:
            f()
        except Exception as e:
            print(f"FAIL  {what}: {type(e).__name__}: {e}")
            return False
        print(f"ok    {what}")
        return True

    def function():
        x = torch.randn(7, 5)
        torch.testing.assert_close(vitrify.compile(lambda x: torch.softmax(x * 2, -1), fullgraph=True)(x), torch.softmax(x * 2, -1))

    def module():
        m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).requires_grad_(False)
        x = torch.randn(3, 8)
        torch.testing.assert_close(vitrify.compile(m, fullgraph=True)(x), m(x))

    def native():
        if not vitrify.counters["kernels_launched"]:
            raise RuntimeError("no kernel of ours ran")

    results = [check("a function", function), check("a module", module), check("native kernels ran", native)]
    return 0 if all(results) else 1


def replay(args):
    """Compiles the graph of a reproducer again, with its options."""
    from vitrify import _C

    with open(args.file) as f:
        text = f.read()
    options = _C.Options()
    for line in text.splitlines():
        if line.startswith("# options: "):
            for name, value in json.loads(line.removeprefix("# options: ")).items():
                options.set(name, value)
    graph = "\n".join(line for line in text.splitlines() if not line.startswith("# "))
    try:
        print(_C.replay(graph, options))
    except _C.Error as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    here = os.path.dirname(os.path.abspath(__file__))
    # these have options of their own
    for name in ("demo", "bench"):
        if argv[:1] == [name] and os.path.exists(os.path.join(here, name + ".py")):
            import importlib

            return importlib.import_module(f"vitrify.{name}").main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m vitrify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("options", help="every option, with type, default and meaning").set_defaults(run=show_options)
    commands.add_parser("doctor", help="check that this installation works").set_defaults(run=doctor)
    p = commands.add_parser("replay", help="compile the graph of a reproducer again")
    p.add_argument("file")
    p.set_defaults(run=replay)
    commands.add_parser("demo", help="networks that people use, eager beside compiled")
    commands.add_parser("bench", help="eager, Vitrify and torch.compile side by side")
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
