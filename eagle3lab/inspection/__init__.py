"""What the weights of fc can and cannot tell; functional tests with captured states."""
