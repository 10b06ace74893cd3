"""The networks measured here are the package's own (`python -m vitrify demo` runs them too)."""
from vitrify.networks import NETWORKS, build  # noqa: F401
