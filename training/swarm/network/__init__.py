"""DHT nodes, addresses, reconnection, and processes that end with their parent."""
