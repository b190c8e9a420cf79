"""What a run is: the schema of a run file, its units, and how a file becomes a frozen Config."""

from lwray.config.load import Resolved, dotted, kind_of, load, load_data
from lwray.config.schema import Config
from lwray.config.units import Length

__all__ = ["Config", "Length", "Resolved", "dotted", "kind_of", "load", "load_data"]
