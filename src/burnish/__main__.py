"""``python -m burnish`` is the command ``burnish``."""

from burnish.cli import main

main()
