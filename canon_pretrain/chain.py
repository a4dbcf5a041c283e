"""`python -m canon_pretrain.chain`: the command of canon_pretrain/cluster/chain.py."""

from canon_pretrain.cluster.chain import main

if __name__ == "__main__":
    main()
