package limits

import (
	"slices"
	"testing"
)

func TestTable(t *testing.T) {
	table, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	// The numbers are those of AWS's documentation of the types.
	tests := []struct {
		name       string
		card0      int
		interfaces int
		addresses  int
		hypervisor string
		bareMetal  bool
	}{
		{"t3.nano", 2, 2, 2, "nitro", false},
		{"t3.small", 3, 3, 4, "nitro", false},
		{"t3.medium", 3, 3, 6, "nitro", false},
		{"t2.medium", 3, 3, 6, "xen", false},
		{"m4.large", 2, 2, 10, "xen", false},
		{"m5.large", 3, 3, 10, "nitro", false},
		{"m5.24xlarge", 15, 15, 50, "nitro", false},
		{"m5.metal", 15, 15, 50, "", true},
		{"c7a.medium", 2, 2, 4, "nitro", false},
		{"p4d.24xlarge", 15, 60, 50, "nitro", false},
		{"p5.48xlarge", 2, 64, 50, "nitro", false},
	}
	for _, tt := range tests {
		typ, ok := table.Lookup(tt.name)
		if !ok {
			t.Errorf("%s: unknown", tt.name)
			continue
		}
		if typ.Cards[0] != tt.card0 || typ.Interfaces() != tt.interfaces || typ.AddressesPerInterface != tt.addresses ||
			typ.Hypervisor != tt.hypervisor || typ.BareMetal != tt.bareMetal {
			t.Errorf("%s: got %+v, want %+v", tt.name, typ, tt)
		}
	}
	if names := table.Names(); len(names) < 1000 || !slices.IsSorted(names) {
		t.Errorf("%d names, sorted %t", len(names), slices.IsSorted(names))
	}
	if _, ok := table.Lookup("t3.gigantic"); ok {
		t.Error("t3.gigantic is known")
	}
}
