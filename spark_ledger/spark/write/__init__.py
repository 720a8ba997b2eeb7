"""The sink: batch, stream, foreach."""
