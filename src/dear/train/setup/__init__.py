"""What happens before a training: data, backbone, roles, settings, notices, and an estimate of its time."""
