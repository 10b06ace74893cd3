"""./x bench: the package's own measurements, with the peers of bench/peers.py beside them."""
from vitrify.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
