"""`python -m trainingjob.engine --config FILE` runs the operator."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from trainingjob.engine.operator import Operator
from trainingjob.engine.settings import BadSettings, load


def main() -> int:
    """Runs the operator; returns its exit code."""
    parser = argparse.ArgumentParser(prog="trainingjob-operator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="configuration (YAML)")
    arguments = parser.parse_args()
    try:
        settings = load(arguments.config)
        logging.basicConfig(
            level=settings.log_level,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        logging.getLogger("kopf").setLevel("WARNING")
        return asyncio.run(Operator(settings).run())
    except BadSettings as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
