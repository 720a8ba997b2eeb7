"""Values of Pulsar's clients as columns, by the schemas that the clients declared."""
