"""Between ranks of one host: payloads in shared memory, signals over Unix-domain sockets."""
