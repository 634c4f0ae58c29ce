"""``python -m dataparallel`` is the ``dataparallel`` command."""

from dataparallel.tools.cli import main

raise SystemExit(main())
