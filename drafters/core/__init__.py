"""What drafters share: contract, batches, layers, KV caches, losses, draft trees and the catalogue."""
