"""Programs that train federated models with bandmf_tf; see README.md in this folder."""
