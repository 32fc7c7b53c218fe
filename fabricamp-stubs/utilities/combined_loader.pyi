from fabricamp.data import CombinedLoader as CombinedLoader
