"""What Pulsar's clients see here, compared with what they see of Pulsar."""
