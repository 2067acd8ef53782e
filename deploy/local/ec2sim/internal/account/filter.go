package account

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// maxFilterValues is how many values all filters of a request may have.
const maxFilterValues = 200

// Filter narrows a Describe operation. A row passes if it has, for the field
// that the filter names, a value that one of Values matches; all filters must
// pass. In Values '*' stands for any text, '?' for any one character, and '\'
// takes the meaning from the character that follows.
type Filter struct {
	Name   string   `query:"Name"`
	Values []string `query:"Value"`
}

// fields returns the values that a row has for a filter name, and whether the
// kind of row knows that name. It must know the same names for every row.
type fields[V any] func(row V, name string) ([]string, bool)

// checkFilters refuses what EC2 refuses, however many rows there are.
func checkFilters[V any](filters []Filter, f fields[V]) *Error {
	total := 0
	for _, filter := range filters {
		if filter.Name == "" {
			return invalid("The filter 'null' is invalid")
		}
		var zero V
		if _, known := f(zero, filter.Name); !known {
			return invalid("The filter '%s' is invalid", filter.Name)
		}
		if len(filter.Values) == 0 {
			return missing("filter value of " + filter.Name)
		}
		total += len(filter.Values)
	}
	if total > maxFilterValues {
		return Errorf("FilterLimitExceeded", "The maximum number of filter values specified on a single call is %d", maxFilterValues)
	}
	return nil
}

func passes[V any](row V, filters []Filter, f fields[V]) bool {
	for _, filter := range filters {
		values, _ := f(row, filter.Name)
		if !slices.ContainsFunc(values, func(value string) bool {
			return slices.ContainsFunc(filter.Values, func(pattern string) bool { return wildcard(pattern, value) })
		}) {
			return false
		}
	}
	return true
}

// wildcard matches a text with a pattern in time proportional to their product.
func wildcard(pattern, text string) bool {
	p, t := []rune(pattern), []rune(text)
	pi, ti := 0, 0
	star, from := -1, 0 // where the last '*' was, and what it has swallowed up to
	for ti < len(t) {
		switch {
		case pi < len(p) && p[pi] == '*':
			star, from = pi, ti
			pi++
		case pi < len(p) && p[pi] == '?':
			pi++
			ti++
		case pi+1 < len(p) && p[pi] == '\\' && p[pi+1] == t[ti]:
			pi += 2
			ti++
		case pi < len(p) && p[pi] != '\\' && p[pi] == t[ti]:
			pi++
			ti++
		case star >= 0:
			from++
			pi, ti = star+1, from
		default:
			return false
		}
	}
	for pi < len(p) && p[pi] == '*' {
		pi++
	}
	return pi == len(p)
}

// tagFields answers the filters that every tagged resource has.
func tagFields(tags []Tag, name string) ([]string, bool) {
	var values []string
	key, isTag := strings.CutPrefix(name, "tag:")
	for _, tag := range tags {
		switch {
		case isTag && tag.Key == key:
			values = append(values, tag.Value)
		case name == "tag-key":
			values = append(values, tag.Key)
		case name == "tag-value":
			values = append(values, tag.Value)
		}
	}
	return values, isTag || name == "tag-key" || name == "tag-value"
}

func one[S ~string](value S) ([]string, bool) {
	if value == "" {
		return nil, true
	}
	return []string{string(value)}, true
}

func flag(value bool) ([]string, bool) { return []string{strconv.FormatBool(value)}, true }

func texts[V any](rows []V, text func(V) string) ([]string, bool) {
	values := make([]string, 0, len(rows))
	for _, row := range rows {
		values = append(values, text(row))
	}
	return values, true
}

// addressTexts lists the addresses of an interface, those in its prefixes not
// included.
func addressTexts(eni NetworkInterface) ([]string, bool) {
	if !eni.Primary.IsValid() {
		return nil, true
	}
	return texts(eni.Addresses(), netip.Addr.String)
}

func (s *state) eniFields(eni NetworkInterface, name string) ([]string, bool) {
	att := eni.Attachment
	if suffix, ok := strings.CutPrefix(name, "attachment."); ok {
		if att == nil {
			_, known := attachmentFields(Attachment{}, s.owner, suffix)
			return nil, known
		}
		return attachmentFields(*att, s.owner, suffix)
	}
	switch name {
	case "network-interface-id":
		return one(eni.ID)
	case "subnet-id":
		return one(eni.Subnet)
	case "vpc-id":
		return one(eni.VPC)
	case "availability-zone":
		return one(eni.Zone)
	case "availability-zone-id":
		return one(eni.ZoneID)
	case "description":
		return one(eni.Description)
	case "status":
		return one(eni.Status)
	case "mac-address":
		return one(eni.MAC)
	case "owner-id":
		return one(s.owner)
	case "interface-type":
		return []string{"interface"}, true
	case "source-dest-check":
		return flag(eni.SourceDestCheck)
	case "requester-managed":
		return flag(false)
	case "group-id":
		return texts(eni.Groups, func(g GroupRef) string { return string(g.ID) })
	case "group-name":
		return texts(eni.Groups, func(g GroupRef) string { return g.Name })
	case "private-ip-address", "addresses.private-ip-address":
		return addressTexts(eni)
	case "private-dns-name":
		if !eni.Primary.IsValid() {
			return nil, true
		}
		return []string{PrivateDNSName(s.region, eni.Primary)}, true
	case "addresses.primary":
		if len(eni.Secondary) > 0 {
			return []string{"true", "false"}, true
		}
		return []string{"true"}, true
	}
	return tagFields(eni.Tags, name)
}

func attachmentFields(att Attachment, owner, name string) ([]string, bool) {
	switch name {
	case "instance-id":
		return one(att.Instance)
	case "attachment-id":
		return one(att.ID)
	case "status":
		return one(att.Status)
	case "instance-owner-id":
		return one(owner)
	case "device-index":
		return []string{strconv.Itoa(att.DeviceIndex)}, true
	case "delete-on-termination":
		return flag(att.DeleteOnTermination)
	case "attach-time":
		return []string{FormatTime(att.Time)}, true
	}
	return nil, false
}

func (s *state) instanceFields(instance Instance, name string) ([]string, bool) {
	if suffix, ok := strings.CutPrefix(name, "network-interface."); ok {
		return s.instanceInterfaceFields(instance, suffix)
	}
	switch name {
	case "instance-id":
		return one(instance.ID)
	case "instance-type":
		return one(instance.Type)
	case "instance-state-name":
		return one(instance.State)
	case "instance-state-code":
		code, _ := instance.State.Code()
		return []string{strconv.Itoa(code)}, true
	case "image-id":
		return one(instance.Image)
	case "availability-zone":
		return one(instance.Zone)
	case "availability-zone-id":
		return one(instance.ZoneID)
	case "subnet-id":
		return one(instance.Subnet)
	case "vpc-id":
		return one(instance.VPC)
	case "reservation-id":
		return one(instance.Reservation)
	case "client-token":
		return one(instance.ClientToken)
	case "owner-id":
		return one(s.owner)
	case "private-ip-address":
		if !instance.Address.IsValid() {
			return nil, true
		}
		return one(instance.Address.String())
	case "private-dns-name":
		if !instance.Address.IsValid() {
			return nil, true
		}
		return one(PrivateDNSName(s.region, instance.Address))
	case "instance.group-id":
		return s.instanceInterfaceFields(instance, "group-id")
	case "instance.group-name":
		return s.instanceInterfaceFields(instance, "group-name")
	}
	return tagFields(instance.Tags, name)
}

func (s *state) instanceInterfaceFields(instance Instance, name string) ([]string, bool) {
	_, known := s.eniFields(NetworkInterface{}, name)
	if strings.HasPrefix(name, "tag") {
		return nil, false
	}
	var values []string
	for _, eni := range s.detail(instance).Attached {
		more, _ := s.eniFields(eni, name)
		values = append(values, more...)
	}
	return values, known
}

func (s *state) subnetFields(subnet Subnet, name string) ([]string, bool) {
	switch name {
	case "subnet-id":
		return one(subnet.ID)
	case "vpc-id":
		return one(subnet.VPC)
	case "availability-zone", "availabilityZone":
		return one(subnet.Zone)
	case "availability-zone-id", "availabilityZoneId":
		return one(subnet.ZoneID)
	case "cidr-block", "cidr", "cidrBlock":
		return one(subnet.CIDR.String())
	case "available-ip-address-count":
		return one(strconv.Itoa(subnet.Free))
	case "state":
		return one("available")
	case "owner-id":
		return one(s.owner)
	case "default-for-az", "defaultForAz", "map-public-ip-on-launch":
		return flag(false)
	}
	return tagFields(subnet.Tags, name)
}

func (s *state) vpcFields(vpc VPC, name string) ([]string, bool) {
	switch name {
	case "vpc-id":
		return one(vpc.ID)
	case "cidr":
		if len(vpc.CIDRs) == 0 {
			return nil, true
		}
		return one(vpc.CIDRs[0].String())
	case "cidr-block-association.cidr-block":
		return texts(vpc.CIDRs, netip.Prefix.String)
	case "state":
		return one("available")
	case "cidr-block-association.state":
		return one("associated")
	case "is-default", "isDefault":
		return flag(false)
	case "owner-id":
		return one(s.owner)
	}
	return tagFields(vpc.Tags, name)
}

func (s *state) groupFields(group SecurityGroup, name string) ([]string, bool) {
	switch name {
	case "group-id":
		return one(group.ID)
	case "group-name":
		return one(group.Name)
	case "description":
		return one(group.Description)
	case "vpc-id":
		return one(group.VPC)
	case "owner-id":
		return one(s.owner)
	}
	return tagFields(group.Tags, name)
}

func (s *state) routeTableFields(table RouteTable, name string) ([]string, bool) {
	switch name {
	case "route-table-id", "association.route-table-id":
		return one(table.ID)
	case "vpc-id":
		return one(table.VPC)
	case "association.subnet-id":
		return texts(table.Subnets, func(id SubnetID) string { return string(id) })
	case "association.main":
		var values []string
		if table.Main {
			values = append(values, "true")
		}
		if len(table.Subnets) > 0 {
			values = append(values, "false")
		}
		return values, true
	case "owner-id":
		return one(s.owner)
	}
	return tagFields(table.Tags, name)
}

func tagRowFields(row TaggedResource, name string) ([]string, bool) {
	switch name {
	case "key":
		return []string{row.Tag.Key}, true
	case "value":
		return []string{row.Tag.Value}, true
	case "resource-id":
		return one(row.ID)
	case "resource-type":
		return one(row.Type)
	}
	if key, ok := strings.CutPrefix(name, "tag:"); ok {
		if row.Tag.Key != key {
			return nil, true
		}
		return []string{row.Tag.Value}, true
	}
	return nil, false
}
