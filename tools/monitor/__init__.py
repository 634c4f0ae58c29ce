"""The `monitor` subcommand: what every device is doing."""
