"""The parts of an engine that know both the relay and the server."""
