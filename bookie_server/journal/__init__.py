"""The journal: how an add becomes durable."""
