// Package limits knows how many interfaces and addresses each EC2 instance
// type may have. The table is AWS's own, as published with its VPC resource
// controller; gen turns it into the CSV file that is embedded here.
package limits

import (
	"encoding/csv"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	_ "embed"
)

//go:generate sh -c "cd gen && GOWORK=off go run ./cmd/limits > ../limits.csv.new && mv ../limits.csv.new ../limits.csv"

//go:embed limits.csv
var table string

// Type is the networking side of one instance type.
type Type struct {
	// Name is the type's name, such as "t3.medium".
	Name string
	// Cards holds the number of interfaces each network card takes, by card
	// index. It has at least one element.
	Cards []int
	// DefaultCard is the card of the primary interface.
	DefaultCard int
	// AddressesPerInterface counts every IPv4 slot of an interface, the one of
	// the primary address included.
	AddressesPerInterface int
	// Hypervisor is "nitro" or "xen", and empty for bare metal.
	Hypervisor string
	// BareMetal is true for the .metal types.
	BareMetal bool
}

// Interfaces is the number of interfaces over all cards.
func (t Type) Interfaces() int {
	sum := 0
	for _, n := range t.Cards {
		sum += n
	}
	return sum
}

// Table maps instance type names to limits. Treat it as read-only.
type Table struct {
	types map[string]Type
	names []string
}

// Load parses the embedded table.
func Load() (*Table, error) {
	r := csv.NewReader(strings.NewReader(table))
	r.Comment = '#'
	rows, err := r.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("parse limits table: %w", err)
	}
	t := &Table{types: make(map[string]Type, len(rows))}
	for _, row := range rows[1:] {
		typ, err := parseRow(row)
		if err != nil {
			return nil, fmt.Errorf("parse limits of %s: %w", row[0], err)
		}
		t.types[typ.Name] = typ
	}
	t.names = slices.Sorted(maps.Keys(t.types))
	return t, nil
}

// Lookup returns the limits of a type, and whether the type is known.
func (t *Table) Lookup(name string) (Type, bool) {
	typ, ok := t.types[name]
	return typ, ok
}

// Names returns all type names, sorted. The slice belongs to the table.
func (t *Table) Names() []string { return t.names }

// MaxAddresses is the largest AddressesPerInterface of any type: what an
// interface that is attached to nothing may hold.
func (t *Table) MaxAddresses() int {
	most := 0
	for _, typ := range t.types {
		most = max(most, typ.AddressesPerInterface)
	}
	return most
}

func parseRow(row []string) (Type, error) {
	typ := Type{Name: row[0], Hypervisor: row[4]}
	var err error
	if typ.AddressesPerInterface, err = strconv.Atoi(row[1]); err != nil {
		return Type{}, err
	}
	for _, field := range strings.Fields(row[2]) {
		n, err := strconv.Atoi(field)
		if err != nil {
			return Type{}, err
		}
		typ.Cards = append(typ.Cards, n)
	}
	if typ.DefaultCard, err = strconv.Atoi(row[3]); err != nil {
		return Type{}, err
	}
	if typ.BareMetal, err = strconv.ParseBool(row[5]); err != nil {
		return Type{}, err
	}
	return typ, nil
}
