"""Files that replay a failed compile."""
import json
import os
import tempfile


def write_reproducer(program, settings, inputs, error):
    """Graph text with the options and inputs as comments; returns its path."""
    path = os.path.join(tempfile.mkdtemp(prefix="vitrify-"), "reproducer.vt")
    head = {"error": error, "options": settings["options"] or {}, "mode": settings["mode"], "inputs": inputs}
    with open(path, "w") as f:
        for key, value in head.items():
            f.write(f"# {key}: {json.dumps(value, default=str)}\n")
        f.write(program.graph)
    return path
